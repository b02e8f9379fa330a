"""Cases meet mutants: those that execute the changed line, cheapest first, up to one that notices.

Ranks are forked from a process that has loaded torch, so a mutant costs the import of the core: on
two ranks, and on four where nobody has noticed it on two.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench.testing.call import FunctionCall
from bench.testing.workers import ForkServer, WorkersError
from bench.validate import rank
from bench.validate.cases import Case
from bench.validate.fuzz import rank as program_rank
from bench.validate.fuzz.fixed import ProgramCase
from bench.validate.fuzz.script import script
from bench.validate.injection import Control
from bench.validate.matrix import AnyCase
from bench.validate.patched_core import CORE, copy_of_core
from bench.validate.session import WorkerSettings, verdicts
from tools.mutation.line_coverage import CoverageFile, Lines, joined, noted, noting_core
from tools.mutation.mutants import Mutant

#: What a case takes at most on a machine with nothing else to do; most take less than one.
_CASE_SECONDS = 10.0
_TRACED_SECONDS = 60.0
#: What a case takes beside its own seconds.
_START_SECONDS = 0.5
_FEW_RANKS = 2


def cover(
    fork_server: ForkServer, wanted: Sequence[AnyCase], known: CoverageFile, deadline: float
) -> Iterator[AnyCase]:
    """Trace every case whose lines are not known yet; yields each. Ends early after `deadline`."""
    with (
        tempfile.TemporaryDirectory(prefix="core-") as folder,
        fork_server.workers(
            WorkerSettings().ranks, noting_core(Path(folder)).parent, rank.prepare
        ) as workers,
    ):
        for case in wanted:
            if known.of(case) is not None:
                continue
            if time.monotonic() > deadline:
                return
            call = FunctionCall.of(rank.run, (case, "cpu"))
            if isinstance(case, ProgramCase):
                call = FunctionCall.of(program_rank.run, (script(case.program), case.engine))
            start = time.monotonic()
            try:
                found = workers.run(noted, call, seconds=_TRACED_SECONDS, ranks=case.ranks)
            except WorkersError:
                found = []
            known.add(case, time.monotonic() - start, joined([lines for _, lines in found]))
            yield case


def executing(mutant: Mutant, cases: Sequence[AnyCase], known: CoverageFile) -> list[AnyCase]:
    """Cases that execute the changed statement, all if an import does; unlike ones come first.

    Programs take turns with the rest. Of the former those come first of whose lines the largest
    share lies in the changed file. Of the rest each next one is the case with most properties that
    no case before it had, for its seconds.
    """
    left = {}
    for case in cases:
        found = known.of(case)
        if found is None:
            continue
        if not mutant.function or mutant.is_on(found[1]):
            left[case.id] = case, found[0] + _START_SECONDS, set(_properties(case))
    about = [case for case, _, _ in left.values() if not isinstance(case, Case)]
    about.sort(key=lambda case: _share(known.of(case), mutant.file), reverse=True)
    for case in about:
        del left[case.id]
    turns = (case for turn in zip_longest(about, _unlike(left)) for case in turn)
    return [case for case in turns if case is not None]


def _unlike(left: dict[str, tuple[AnyCase, float, set[Any]]]) -> Iterator[AnyCase]:
    """By id: a case, its seconds and its properties. The next one has most new ones per second."""
    met: set[Any] = set()
    while left:
        name = max(left, key=lambda one: (len(left[one][2] - met) / left[one][1], one))
        case, _, properties = left.pop(name)
        met |= properties
        yield case


def _share(found: tuple[float, Lines] | None, file: str) -> float:
    if found is None:
        return 0.0
    return len(found[1].get(file, ())) / max(1, sum(map(len, found[1].values())))


def _properties(case: AnyCase) -> dict[tuple[str, object], None]:
    return dict.fromkeys(dataclasses.asdict(case).items()) if isinstance(case, Case) else {}


def _cost(case: AnyCase) -> int:
    """Few ranks come first: going back to fewer confuses the names that torch gives to groups."""
    return case.ranks


class Trials:
    """Mutants, one after another, on ranks of a fork server."""

    def __init__(self, fork_server: ForkServer, passed: Collection[str]) -> None:
        """passed: cases that are known to pass on the core as it is."""
        self._fork_server = fork_server
        workers = WorkerSettings(case_seconds=_CASE_SECONDS)
        self._control = Control(fork_server, workers, passed)

    def result(self, mutant: Mutant, chosen: Sequence[AnyCase]) -> dict[str, Any]:
        """What came of it, as plain data."""
        start = time.monotonic()
        told = self._first_failure(mutant, sorted(chosen, key=_cost))
        seconds = round(time.monotonic() - start, 1)
        return {"outcome": "caught" if told else "survived", **told, "seconds": seconds}

    def _first_failure(self, mutant: Mutant, chosen: Sequence[AnyCase]) -> dict[str, str]:
        """Case, check and finding; empty where nothing fails that passes without the change."""
        with tempfile.TemporaryDirectory(prefix="core-") as folder:
            copy_of_core(Path(folder))
            mutant.write(Path(folder) / CORE.name)
            for are_few in (True, False):
                cases = [case for case in chosen if (case.ranks <= _FEW_RANKS) == are_few]
                told = self._failure_on(Path(folder), cases) if cases else {}
                if told:
                    return told
        return {}

    def _failure_on(self, core: Path, cases: Sequence[AnyCase]) -> dict[str, str]:
        by_id = {case.id: case for case in cases}
        ranks = max(case.ranks for case in cases)
        workers = dataclasses.replace(self._control.workers, ranks=ranks)
        for verdict in verdicts(self._fork_server, cases, workers, core=core):
            if verdict.state == "failed" and self._control.passes(by_id[verdict.case]):
                failure = verdict.failures[0]
                said = failure.finding.found if failure.finding else ""
                return {"case": verdict.case, "check": failure.check, "found": said[:160]}
        return {}
