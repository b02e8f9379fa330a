"""Programs drawn one after another, run on resident ranks, and shrunk where they fail."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from bench.testing.workers import Workers
from bench.validate.drawing import draw
from bench.validate.outcomes import outcome_of
from bench.validate.program import Program
from bench.validate.rank import Outcome
from bench.validate.script import script
from bench.validate.shrinking import shrunk

_SHRINK_SECONDS = 90.0


@dataclass
class FailureKind:
    """A way of failing. number: of the first program that failed so; numbers: of all of them."""

    number: int
    outcome: Outcome
    program: Program
    numbers: list[int] = field(default_factory=list)

    @property
    def script(self) -> str:
        """The shrunk program."""
        title = f"{self.program.engine} {self.outcome.kind}: {self.outcome.lines[0]}"
        return script(self.program, title)


@dataclass
class Tally:
    """What came of all programs so far."""

    counts: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    failures: list[FailureKind] = field(default_factory=list)

    @property
    def ran(self) -> int:
        """Programs in all."""
        return sum(self.counts.values())


def fuzz(
    workers: Workers, engine: str, seed: int, numbers: Iterable[int], tally: Tally
) -> Iterator[Tally]:
    """Run programs `numbers` of `seed`; `tally` after each, which has it."""
    for number in numbers:
        program = draw(engine, seed, number)
        outcome = outcome_of(workers, program)
        if outcome.failed:
            # What ranks have been through before must not matter.
            workers.end()
            outcome = outcome_of(workers, program)
        tally.counts[outcome.kind] = tally.counts.get(outcome.kind, 0) + 1
        if outcome.kind == "refused":
            said = re.sub(r"\d+", "N", outcome.text.split("\n")[0])[:160]
            tally.refusals[said] = tally.refusals.get(said, 0) + 1
        if outcome.failed:
            _note(tally, FailureKind(number, outcome, program, [number]), workers)
        yield tally


def _note(tally: Tally, failure: FailureKind, workers: Workers) -> None:
    """Shrink it, unless it holds what an earlier failure of the same kind was shrunk to."""
    signature, features = failure.outcome.signature, failure.program.features()
    for known in tally.failures:
        if known.outcome.signature == signature and known.program.features() <= features:
            known.numbers.append(failure.number)
            return

    def fails(smaller: Program) -> bool:
        again = outcome_of(workers, smaller)
        if again.signature != signature:
            return False
        failure.outcome = again
        return True

    failure.program = shrunk(failure.program, fails, _SHRINK_SECONDS)
    for known in tally.failures:
        if known.program == failure.program:
            known.numbers.append(failure.number)
            return
    tally.failures.append(failure)
