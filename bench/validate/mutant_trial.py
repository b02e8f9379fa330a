"""Cases meet mutants: those that execute the changed line, cheapest first, up to one that notices.

Ranks are forked from a process that has loaded torch, so a mutant costs the import of the core.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.testing.call import Call
from bench.testing.workers import ForkServer, WorkersError
from bench.validate import rank
from bench.validate.cases import Case
from bench.validate.contracts.contract_case import ContractCase, check
from bench.validate.fuzz import rank as program_rank
from bench.validate.fuzz.fixed import ProgramCase
from bench.validate.fuzz.script import script
from bench.validate.injection import Control
from bench.validate.line_coverage import CoverageFile, Lines, joined, traced
from bench.validate.matrix import AnyCase
from bench.validate.mutants import Mutant, write
from bench.validate.mutation import CORE, copy_of_core
from bench.validate.session import WorkerSettings, verdicts

#: What a case takes at most on a machine with nothing else to do; most take less than one.
_CASE_SECONDS = 10.0
_TRACED_SECONDS = 60.0
#: What a case takes beside its own seconds.
_START_SECONDS = 0.5


def cover(
    fork_server: ForkServer, wanted: Sequence[AnyCase], known: CoverageFile, deadline: float
) -> Iterator[AnyCase]:
    """Trace every case whose lines are not known yet; yields each. Ends early after `deadline`."""
    with fork_server.workers(WorkerSettings().ranks, None, rank.prepare) as workers:
        for case in wanted:
            if known.of(case) is not None:
                continue
            if time.monotonic() > deadline:
                return
            call = Call.of(rank.run, (case, "cpu"))
            if isinstance(case, ProgramCase):
                call = Call.of(program_rank.run, (script(case.program), case.engine))
            elif isinstance(case, ContractCase):
                call = Call.of(check, (case.module,))
            start = time.monotonic()
            try:
                lines = workers.run(traced, call, seconds=_TRACED_SECONDS, ranks=case.ranks)
            except WorkersError:
                lines = []
            known.add(case, time.monotonic() - start, joined(lines))
            yield case


def executing(mutant: Mutant, cases: Sequence[AnyCase], known: CoverageFile) -> list[AnyCase]:
    """Cases that execute the changed statement, all if an import does; unlike ones come first.

    Of contracts and programs those that execute least besides it, since they are about it. Then
    each next case is the one with most properties that no case before it had, for its seconds.
    """
    left = {}
    for case in cases:
        found = known.of(case)
        if found is not None and (not mutant.function or mutant.is_on(found[1])):
            left[case.id] = case, found[0] + _START_SECONDS, _properties(case)
    contracts = [case for case, _, _ in left.values() if not isinstance(case, Case)]
    chosen: list[AnyCase] = sorted(contracts, key=lambda case: _extent(known.of(case)))
    for case in contracts:
        del left[case.id]
    met: set[tuple[str, object]] = set()
    while left:
        name = max(left, key=lambda one: (len(left[one][2] - met) / left[one][1], one))
        case, _, properties = left.pop(name)
        met |= properties
        chosen.append(case)
    return chosen


def _extent(found: tuple[float, Lines] | None) -> int:
    return sum(map(len, found[1].values())) if found else 0


def _properties(case: AnyCase) -> set[tuple[str, object]]:
    return set(dataclasses.asdict(case).items()) if isinstance(case, Case) else set()


def _ranks_of_its_kind(case: AnyCase) -> tuple[int, bool]:
    return case.ranks, isinstance(case, Case)


class Trials:
    """Mutants, one after another, on ranks of a fork server."""

    def __init__(self, fork_server: ForkServer, passed: Collection[str]) -> None:
        """passed: cases that are known to pass on the core as it is."""
        self._fork_server = fork_server
        workers = WorkerSettings(case_seconds=_CASE_SECONDS)
        self._control = Control(fork_server, workers, passed)

    def result(self, mutant: Mutant, chosen: Sequence[AnyCase]) -> dict[str, Any]:
        """What came of it, as plain data.

        Few ranks come first: going back to fewer confuses the names that torch gives to groups.
        """
        start = time.monotonic()
        told = self._first_failure(mutant, sorted(chosen, key=_ranks_of_its_kind))
        seconds = round(time.monotonic() - start, 1)
        return {"outcome": "caught" if told else "survived", **told, "seconds": seconds}

    def _first_failure(self, mutant: Mutant, chosen: Sequence[AnyCase]) -> dict[str, str]:
        """Case, check and finding; empty where nothing fails that passes without the change."""
        if not chosen:
            return {}
        by_id = {case.id: case for case in chosen}
        with tempfile.TemporaryDirectory(prefix="core-") as folder:
            copy_of_core(Path(folder))
            write(mutant, Path(folder) / CORE.name)
            found = verdicts(self._fork_server, chosen, self._control.workers, core=Path(folder))
            for verdict in found:
                if verdict.state == "failed" and self._control.passes(by_id[verdict.case]):
                    failure = verdict.failures[0]
                    said = failure.finding.found if failure.finding else ""
                    return {
                        "case": verdict.case,
                        "check": failure.check,
                        "found": said[:160],
                    }
        return {}
