"""Which runs of a plan are there already.

A run counts as done only for the same resolved configuration AND the same code, and only while its
record is whole: a damaged one is measured again. A run that failed with both unchanged would fail
again, so it is not repeated unasked; one that was interrupted is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.record import FINISHED_GOOD, RunRecord
from bench.spec import ResolvedRun
from sweeps.plan import Plan, PlannedCell

CodeIdentity = Callable[[ResolvedRun], str]
_UNFINISHED = frozenset({"running", "interrupted"})


@dataclass(frozen=True)
class PlannedRun:
    """One run that the plan asks for."""

    cell: PlannedCell
    repeat: int


@dataclass(frozen=True)
class PastRun:
    """The record that decides about a planned run."""

    cell: str
    repeat: int
    run_id: str
    state: str
    reason: str


@dataclass(frozen=True)
class Progressed:
    """The runs of a plan by what is known of them; every run is in exactly one of the three."""

    missing: tuple[PlannedRun, ...]
    done: tuple[PastRun, ...]
    failed: tuple[PastRun, ...]


def planned_runs(plan: Plan) -> Iterable[PlannedRun]:
    """Every run, first repeats first: repeats of one cell are spread over the whole sweep."""
    most = max((cell.repeats for cell in plan.cells), default=0)
    for repeat in range(most):
        for cell in plan.cells:
            if repeat < cell.repeats:
                yield PlannedRun(cell, repeat)


def compare_with_records(
    plan: Plan, records: Iterable[RunRecord], code_identity: CodeIdentity
) -> Progressed:
    """Sort the runs of `plan` by what `records` (oldest first, of this sweep) say.

    A good record outweighs a failed one of the same configuration and code, whichever is newer.
    """
    past = _deciding_records(records)
    code_identity = remembered(code_identity)
    missing: list[PlannedRun] = []
    done: list[PastRun] = []
    failed: list[PastRun] = []
    for run in planned_runs(plan):
        resolved = run.cell.resolved
        found = past.get((resolved.config_hash, run.repeat, code_identity(resolved)))
        if found is None:
            missing.append(run)
            continue
        known = PastRun(
            run.cell.id, run.repeat, found.run_id, found.status.state, found.status.reason
        )
        (done if known.state in FINISHED_GOOD else failed).append(known)
    return Progressed(tuple(missing), tuple(done), tuple(failed))


def remembered(code_identity: CodeIdentity) -> CodeIdentity:
    """`code_identity` asked once per engine, on which alone it depends: it reads many files."""
    known: dict[str, str] = {}

    def ask(resolved: ResolvedRun) -> str:
        name = resolved.engine.name
        if name not in known:
            known[name] = code_identity(resolved)
        return known[name]

    return ask


def _deciding_records(records: Iterable[RunRecord]) -> dict[tuple[str, int, str], RunRecord]:
    deciding: dict[tuple[str, int, str], RunRecord] = {}
    for record in records:
        status = record.status
        if status.state in _UNFINISHED or status.arm is not None:
            continue
        if status.state in FINISHED_GOOD and not _is_whole(record):
            continue
        key = (record.resolved.config_hash, status.repeat, status.code)
        before = deciding.get(key)
        good_before = before is not None and before.status.state in FINISHED_GOOD
        if good_before and status.state not in FINISHED_GOOD:
            continue
        deciding[key] = record
    return deciding


def _is_whole(record: RunRecord) -> bool:
    """No file is damaged, and every rank has every step."""
    ranks = range(record.resolved.launch.ranks)
    steps = record.resolved.train.steps
    return not record.problems and all(len(record.steps.get(r, ())) >= steps for r in ranks)
