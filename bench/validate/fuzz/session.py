"""Programs drawn one after another, run on resident ranks, and shrunk where they fail."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.testing.workers import Failure as RankFailure
from bench.testing.workers import ForkServer, Workers, WorkersError
from bench.validate.fuzz import rank
from bench.validate.fuzz.drawing import draw
from bench.validate.fuzz.program import Program
from bench.validate.fuzz.script import script
from bench.validate.fuzz.shrinking import shrunk
from bench.validate.rank import prepare

MODULES = ("bench.validate.fuzz.rank", "bench.validate.rank")
RANKS = 4
_PROGRAM_SECONDS = 10.0
_SHRINK_SECONDS = 90.0
#: Meshes of two axes leave process groups behind.
_PROGRAMS_PER_GROUP = 100
_LAST_EVENTS = 4
_FRAMES = 3

Kind = Literal["equal", "refused", "differs", "raised", "died", "hung"]


@dataclass(frozen=True)
class Outcome:
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


def outcome_on(workers: Workers, program: Program) -> Outcome:
    """Run a program on the first ranks of `workers`."""
    try:
        answers = workers.run(
            rank.run, script(program), program.engine, seconds=_PROGRAM_SECONDS, ranks=program.ranks
        )
    except WorkersError as error:
        return _failed(error)
    ended = [answer for answer in answers if answer is not None]
    if not ended:
        return Outcome("equal")
    if any(one.kind != "differs" for one in ended):
        # Collectives may be under way.
        workers.end()
    if len(ended) < len(answers) and ended[0].kind == "refused":
        return Outcome("raised", f"on some ranks alone: {ended[0].text}")
    told = min(
        ended,
        key=lambda one: (("differs", "raised", "refused").index(one.kind), -one.text.count("\n")),
    )
    return Outcome(told.kind, told.text)


@dataclass
class Failure:
    """A way of failing. number: of the first program that failed so; numbers: of all of them."""

    number: int
    outcome: Outcome
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
    failures: list[Failure] = field(default_factory=list)

    @property
    def ran(self) -> int:
        """Programs in all."""
        return sum(self.counts.values())


class Fuzzer:
    """Runs programs on ranks of `fork_server`. A context manager."""

    def __init__(self, fork_server: ForkServer, core: Path | None = None) -> None:
        """core: folder with the mfsdp_core that the ranks import, None is the checkout's own."""
        self._workers = Workers(fork_server, RANKS, core, prepare)
        self._run = 0

    def __enter__(self) -> Fuzzer:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.end()

    def outcome(self, program: Program) -> Outcome:
        """Run it."""
        self._run += 1
        if self._run % _PROGRAMS_PER_GROUP == 0:
            self._workers.end()
        return outcome_on(self._workers, program)

    def fuzz(self, engine: str, seed: int, count: int, stop: threading.Event) -> Iterator[Tally]:
        """Programs 0 to `count` - 1 of `seed`; the tally after each."""
        tally = Tally()
        for number in range(count):
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

    def _note(self, tally: Tally, number: int, program: Program, outcome: Outcome) -> None:
        """Shrink it, unless it holds what an earlier failure of the same kind was shrunk to."""
        for known in tally.failures:
            same = known.outcome.signature == outcome.signature
            if same and known.program.features() <= program.features():
                known.numbers.append(number)
                return
        smallest = outcome

        def fails(smaller: Program) -> bool:
            nonlocal smallest
            found = self.outcome(smaller)
            if found.signature != outcome.signature:
                return False
            smallest = found
            return True

        program = shrunk(program, fails, _SHRINK_SECONDS)
        for known in tally.failures:
            if known.program == program:
                known.numbers.append(number)
                return
        tally.failures.append(Failure(number, smallest, program, [number]))


def _failed(error: WorkersError) -> Outcome:
    """The rank that says most: an exception of its own, a death, a hang."""
    raised = [(_last_of(f), f) for f in error.failures if f.kind == "raised"]
    own = [one for one in raised if not re.search(r"[Cc]onnection (closed|reset)|gloo", one[0])]
    for text, failure in (*own, *raised):
        differs = text.startswith("AssertionError: cycle ")
        said = [text.removeprefix("AssertionError: "), *_where(failure)]
        return Outcome("differs" if differs else "raised", "\n".join(said))
    died = [failure for failure in error.failures if failure.kind == "died"]
    if died:
        first = died[0]
        return Outcome("died", "\n".join([f"rank {first.rank} {first.text}", *_where(first)]))
    waiting = [f"rank {f.rank} {_innermost(f.text)}{_last(f)}" for f in error.failures]
    lines = [line for f in error.failures[:1] for line in _where(f)]
    return Outcome("hung", "\n".join(["; ".join(waiting), *lines]))


def _last_of(failure: RankFailure) -> str:
    """The exception of a traceback, without what its message says further."""
    lines = failure.text.strip().splitlines()
    begin = [n for n, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return lines[begin[-1] if begin else -1]


def _where(failure: RankFailure) -> list[str]:
    """Lines of its log: the pass that it began last, and the last events of the core."""
    begun = [n for n, line in enumerate(failure.log) if line.startswith("in ")]
    log = failure.log[begun[-1] :] if begun else failure.log
    return [*log[:1], *log[1:][-_LAST_EVENTS:]]


def _last(failure: RankFailure) -> str:
    return f", {said[-1]}" if (said := _where(failure)) else ""


def _innermost(stack: str) -> str:
    """The innermost functions of the core in what faulthandler wrote, else the innermost of all."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    core = [one for one in frames if "/mfsdp_core/" in one[0]][:_FRAMES]
    named = [
        f"{function} ({file.rpartition('/mfsdp_core/')[2]}:{line})"
        for file, line, function in core or frames[:1]
    ]
    return f"waits in {', from '.join(named) or 'no Python'}"
