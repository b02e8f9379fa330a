"""Which runs of a plan are there already.

A run counts as done only for the same resolved configuration AND the same code, and only while its
record is whole: a damaged one is measured again. A run that failed with both unchanged would fail
again, so it is not repeated unasked; one that was interrupted is.

What has a record and runs again is told why, in words: nothing is repeated silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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


_MAX_NAMED = 3
_NO_FAULT = "another run of its block does not count, or it was asked for"


def lines_of_repeats(
    runs: Iterable[PlannedRun],
    records: Iterable[RunRecord],
    code_of: Callable[[PlannedRun], str],
) -> tuple[str, ...]:
    """One line per reason, with the runs that it holds for; runs without any record have none.

    Args:
        runs: what is about to run.
        records: all runs of the sweep, oldest first.
        code_of: names the code of a run today.
    """
    by_key = _newest(records)
    found: dict[str, list[str]] = {}
    for run in runs:
        past = by_key.get((run.cell.of(run.arm).config_hash, run.repeat, run.arm))
        past = past or by_key.get((run.cell.id, run.repeat, run.arm))
        if past is not None:
            found.setdefault(_reason(run, past, code_of), []).append(_name(run))
    return tuple(f"again: {_named(names)}: {reason}" for reason, names in found.items())


def _newest(records: Iterable[RunRecord]) -> Mapping[tuple[str, int, str | None], RunRecord]:
    newest: dict[tuple[str, int, str | None], RunRecord] = {}
    for record in records:
        status = record.status
        newest[record.resolved.config_hash, status.repeat, status.arm] = record
        newest[status.cell or "", status.repeat, status.arm] = record
    return newest


def _reason(run: PlannedRun, past: RunRecord, code_of: Callable[[PlannedRun], str]) -> str:
    status = past.status
    if past.resolved.config_hash != run.cell.of(run.arm).config_hash:
        return "the settings of the cell have changed since its last run"
    if status.code_proof == "mismatch":
        return "its ranks had imported other code than they should"
    if status.code != code_of(run):
        return "the code that it measures has changed since its last run"
    if past.damage:
        return f"its record is damaged ({past.damage[0]})"
    if status.state in FINISHED_GOOD:
        packed = "it was packed, so it has no times"
        return packed if status.packed else _NO_FAULT
    return f"its last run ended as {status.state}"


def _name(run: PlannedRun) -> str:
    name = run.cell.id if run.repeat == 0 else f"{run.cell.id} (repeat {run.repeat})"
    return f"{name} [{run.arm}]" if run.arm else name


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    hidden = len(names) - _MAX_NAMED
    return f"{shown} and {hidden} more" if hidden > 0 else shown
