"""Which runs of a plan are there already.

A run counts as done only for the same resolved configuration AND the same code, and only while its
record is whole: a damaged one is measured again. A run that failed with both unchanged would fail
again, so it is not repeated unasked; one that was interrupted is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.record import FINISHED_GOOD, STOPPED, RunRecord
from bench.spec import ResolvedRun
from sweeps.plan import Plan, PlannedCell

CodeIdentity = Callable[[ResolvedRun], str]
UNFINISHED = STOPPED | {"running"}


@dataclass(frozen=True)
class PlannedRun:
    """One run that the plan asks for; `arm` None where the plan has no arms."""

    cell: PlannedCell
    repeat: int
    arm: str | None = None


@dataclass(frozen=True)
class PastRun:
    """The record that decides about a planned run.

    `wrong_code`: its ranks found that they import other code than its arm's.
    """

    cell: str
    repeat: int
    run_id: str
    state: str
    reason: str
    arm: str | None = None
    wrong_code: bool = False


@dataclass(frozen=True)
class Progressed:
    """The runs of a plan by what is known of them; every run is in exactly one of the three."""

    missing: tuple[PlannedRun, ...]
    done: tuple[PastRun, ...]
    failed: tuple[PastRun, ...]


def planned_runs(plan: Plan) -> Iterable[PlannedRun]:
    """Every run, first repeats first: repeats of one cell are spread over the whole sweep.

    With arms, all runs of the first arm, then all of the next (`sweeps.interleave` has the other
    order).
    """
    most = max((cell.repeats for cell in plan.cells), default=0)
    arms: tuple[str | None, ...] = tuple(arm.name for arm in plan.arms) or (None,)
    for arm in arms:
        for repeat in range(most):
            for cell in plan.cells:
                if repeat < cell.repeats:
                    yield PlannedRun(cell, repeat, arm)


def compare_with_records(
    plan: Plan, records: Iterable[RunRecord], code_of: Callable[[PlannedRun], str]
) -> Progressed:
    """Sort the runs of `plan` by what `records` (oldest first, of this sweep) say.

    A good record outweighs a failed one of the same configuration and code, whichever is newer. One
    of a run that was packed has no times, and counts only where runs are packed.
    """
    past = _deciding_records(records, packed=plan.pack)
    missing: list[PlannedRun] = []
    done: list[PastRun] = []
    failed: list[PastRun] = []
    for run in planned_runs(plan):
        config_hash = run.cell.of(run.arm).config_hash
        found = past.get((config_hash, run.repeat, run.arm, code_of(run)))
        if found is None:
            missing.append(run)
            continue
        status = found.status
        known = PastRun(run.cell.id, run.repeat, found.run_id, status.state, status.reason, run.arm)
        (done if known.state in FINISHED_GOOD else failed).append(known)
    return Progressed(tuple(missing), tuple(done), tuple(failed))


def remembered(code_identity: CodeIdentity) -> CodeIdentity:
    """`code_identity` asked once per engine and model factory: it reads many files."""
    known: dict[tuple[str, str | None], str] = {}

    def ask(resolved: ResolvedRun) -> str:
        name = resolved.engine.name, resolved.factory
        if name not in known:
            known[name] = code_identity(resolved)
        return known[name]

    return ask


def _deciding_records(
    records: Iterable[RunRecord], *, packed: bool
) -> dict[tuple[str, int, str | None, str], RunRecord]:
    """The record that counts, by configuration, repeat, arm and code. Runs of blocks never do."""
    deciding: dict[tuple[str, int, str | None, str], RunRecord] = {}
    for record in records:
        status = record.status
        if status.state in UNFINISHED or status.attempt is not None:
            continue
        if status.code_proof == "mismatch":
            continue
        if record.damage or (status.packed and not packed):
            continue
        key = (record.resolved.config_hash, status.repeat, status.arm, status.code)
        before = deciding.get(key)
        good_before = before is not None and before.status.state in FINISHED_GOOD
        if good_before and status.state not in FINISHED_GOOD:
            continue
        deciding[key] = record
    return deciding
