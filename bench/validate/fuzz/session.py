"""Programs drawn one after another, run on resident ranks, and shrunk where they fail."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.testing.workers import ForkServer, Workers
from bench.validate.fuzz import rank
from bench.validate.fuzz.drawing import draw
from bench.validate.fuzz.program import Program
from bench.validate.fuzz.script import script
from bench.validate.fuzz.shrinking import shrunk
from bench.validate.fuzz.trial import DiffersError
from bench.validate.rank import prepare
from bench.validate.ranks import CALLS_OF_A_GROUP, MOST_CPU_SECONDS, outcome_on

MODULES = ("bench.validate.fuzz.rank", "bench.validate.rank")
RANKS = 4
_PROGRAM_SECONDS = 10.0
#: Of processor time, ten times what a pass uses; as much of waiting again.
_PASS_SECONDS = 0.5
_SHRINK_SECONDS = 90.0

Kind = Literal["equal", "refused", "differs", "raised", "died", "hung"]


@dataclass(frozen=True)
class ProgramOutcome:
    """text: what the rank that says most said last, in a line, and then where that was."""

    kind: Kind
    text: str = ""

    @property
    def failed(self) -> bool:
        """Neither as in plain torch nor refused in words."""
        return self.kind not in ("equal", "refused")

    @property
    def signature(self) -> str:
        """Equal for programs that fail in the same way: the text without names and numbers."""
        if self.kind == "hung":
            return self.kind
        words = re.sub(r"\S*\d\S*|\S*\.\S*|'[^']*'", "", self.text.split("\n")[0])
        return " ".join([self.kind, *words.split()[:8]])


def outcome_of(workers: Workers, program: Program) -> ProgramOutcome:
    """Run a program on the first ranks of `workers`."""
    passes = sum(len(cycle.passes) for cycle in program.cycles)
    further = passes * _PASS_SECONDS
    seconds, cpu_seconds = _PROGRAM_SECONDS + 2 * further, MOST_CPU_SECONDS + further
    limits = {"seconds": seconds, "cpu_seconds": cpu_seconds}
    outcome = outcome_on(workers, rank.run, program, ranks=program.ranks, **limits)
    if outcome.kind == "ended":
        differed = [answer for answer in outcome.answers if answer is not None]
        said = [
            line for difference in differed[:1] for line in (difference.text, *difference.where)
        ]
        return ProgramOutcome("differs", "\n".join(said)) if said else ProgramOutcome("equal")
    if outcome.kind == "refused":
        workers.end()  # collectives may be under way
        return ProgramOutcome("refused", outcome.text)
    kind: Kind = outcome.kind
    text = outcome.text
    if DiffersError.__name__ in text.partition(":")[0]:
        kind, text = "differs", text.partition(": ")[2]
    elif kind == "died":
        text = f"rank {outcome.rank} {text}"
    return ProgramOutcome(kind, "\n".join([text, *outcome.where]))


@dataclass
class FailureKind:
    """A way of failing. number: of the first program that failed so; numbers: of all of them."""

    number: int
    outcome: ProgramOutcome
    program: Program
    numbers: list[int] = field(default_factory=list)

    @property
    def script(self) -> str:
        """The shrunk program."""
        said = self.outcome.text.split("\n")[0]
        return script(self.program, f"{self.program.engine} {self.outcome.kind}: {said}")


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


class Fuzzer:
    """Runs programs on ranks of `fork_server`. A context manager."""

    def __init__(self, fork_server: ForkServer, core: Path | None = None) -> None:
        """core: folder with the mfsdp_core that the ranks import, None is the checkout's own."""
        self._workers = Workers(fork_server, RANKS, core, prepare, CALLS_OF_A_GROUP)

    def __enter__(self) -> Fuzzer:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.end()

    def outcome(self, program: Program) -> ProgramOutcome:
        """Run it."""
        return outcome_of(self._workers, program)

    def fuzz(
        self,
        engine: str,
        seed: int,
        numbers: Iterable[int],
        stop: threading.Event,
        tally: Tally | None = None,
    ) -> Iterator[Tally]:
        """Programs `numbers` of `seed`; the tally after each, which `tally` begins."""
        tally = Tally() if tally is None else tally
        for number in numbers:
            if stop.is_set():
                return
            program = draw(engine, seed, number)
            outcome = self.outcome(program)
            if outcome.failed:
                # What ranks have been through before must not matter.
                self._workers.end()
                outcome = self.outcome(program)
            tally.counts[outcome.kind] = tally.counts.get(outcome.kind, 0) + 1
            if outcome.kind == "refused":
                said = re.sub(r"\d+", "N", outcome.text.split("\n")[0])[:160]
                tally.refusals[said] = tally.refusals.get(said, 0) + 1
            if outcome.failed:
                self._note(tally, number, program, outcome)
            yield tally

    def _note(self, tally: Tally, number: int, program: Program, outcome: ProgramOutcome) -> None:
        """Shrink it, unless it holds what an earlier failure of the same kind was shrunk to."""
        for known in tally.failures:
            same = known.outcome.signature == outcome.signature
            if same and known.program.features() <= program.features():
                known.numbers.append(number)
                return
        smallest = outcome

        def fails(smaller: Program) -> bool:
            nonlocal smallest
            again = self.outcome(smaller)
            if again.signature != outcome.signature:
                return False
            smallest = again
            return True

        program = shrunk(program, fails, _SHRINK_SECONDS)
        for known in tally.failures:
            if known.program == program:
                known.numbers.append(number)
                return
        tally.failures.append(FailureKind(number, smallest, program, [number]))
