"""Why a run that has a record is run again, in words: nothing is repeated silently."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from bench.record import FINISHED_GOOD, RunRecord
from sweeps.resume import PlannedRun

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
