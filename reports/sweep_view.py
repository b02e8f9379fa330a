"""One sweep as a report sees it: what was planned, what ran, what is missing or damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.errors import UsageError
from bench.record import RunRecord
from bench.store import ResultsStore
from reports.cells import Cell, make_cell


@dataclass(frozen=True)
class PrunedCell:
    """A cell that could not run where the sweep was planned."""

    name: str
    rule: str
    reason: str


@dataclass(frozen=True)
class SweepView:
    """`cells` in the order of the plan. `problems` are sentences about files that are damaged.

    merged: (cell, cell whose runs count for it too). stale: runs of configurations that the sweep
    no longer plans; they are left out.
    """

    id: str
    description: str = ""
    source: str = ""
    planned: int = 0
    cells: tuple[Cell, ...] = ()
    not_run: tuple[str, ...] = ()
    pruned: tuple[PrunedCell, ...] = ()
    merged: tuple[tuple[str, str], ...] = ()
    stale: int = 0
    problems: tuple[str, ...] = ()


def load_sweeps(store: ResultsStore, sweep_ids: Sequence[str]) -> list[SweepView]:
    """Read the sweeps. Cell names get the sweep's id in front where there are several sweeps.

    Raises:
        UsageError: no sweep named, or one that has neither a plan nor a run.
    """
    if not sweep_ids:
        known = ", ".join(store.sweeps()) or "none"
        raise UsageError(f"no sweep named; expected at least one of: {known}")
    records = list(store.records())
    several = len(set(sweep_ids)) > 1
    return [
        _load(store, sweep_id, records, prefix=f"{sweep_id}: " if several else "")
        for sweep_id in dict.fromkeys(sweep_ids)
    ]


def _load(
    store: ResultsStore, sweep_id: str, records: Sequence[RunRecord], prefix: str
) -> SweepView:
    own = [record for record in records if record.status.sweep == sweep_id]
    problems: list[str] = []
    try:
        plan: Mapping[str, Any] = store.read_plan(sweep_id)
    except UsageError as error:
        if not own:
            raise
        problems.append(f"the plan of {sweep_id} cannot be read: {error}")
        plan = {}
    planned = _planned(plan)
    by_cell = _members(own, planned, records) if planned else _by_name(own)
    cells = [
        make_cell(prefix + cell + (f" [{arm}]" if arm else ""), members)
        for (cell, arm), members in by_cell.items()
    ]
    ran = {cell for cell, _ in by_cell}
    shown = {record.run_id for members in by_cell.values() for record in members}
    stale = sum(record.run_id not in shown for record in own)
    problems.extend(f"{run.run_id}: {run.problem}" for run in store.damaged())
    return SweepView(
        id=sweep_id,
        description=_text(plan, "description"),
        source=_text(plan, "source"),
        planned=len(planned) or len(ran),
        cells=tuple(cells),
        not_run=tuple(prefix + cell for cell in planned if cell not in ran),
        pruned=tuple(
            PrunedCell(prefix + _text(item, "id"), _text(item, "rule"), _text(item, "reason"))
            for item in _items(plan, "pruned")
        ),
        merged=tuple(
            (prefix + _text(item, "id"), prefix + _text(item, "same_as"))
            for item in _items(plan, "duplicates")
        ),
        stale=stale,
        problems=tuple(problems),
    )


def _members(
    own: Sequence[RunRecord],
    planned: Mapping[str, Sequence[str]],
    records: Sequence[RunRecord],
) -> dict[tuple[str, str], list[RunRecord]]:
    """Runs by (cell, arm) in the order of the plan, matched by configuration as resuming does.

    A planned cell without a run of its own takes runs of the same configuration from elsewhere in
    the store: a run whose status is damaged no longer says where it belongs.
    """
    found: dict[tuple[str, str], list[RunRecord]] = {}
    for cell, hashes in planned.items():
        same = [r for r in own if r.resolved.config_hash in hashes] or [
            r for r in records if r.resolved.config_hash in hashes and not r.status.sweep
        ]
        if len(hashes) > 1:
            # Arms of two cells may have one run in common: the configuration is not enough.
            same = [r for r in same if r.status.cell == cell] or same
        for record in same:
            found.setdefault((cell, record.status.arm or ""), []).append(record)
    return found


def _by_name(own: Sequence[RunRecord]) -> dict[tuple[str, str], list[RunRecord]]:
    """Runs by (cell, arm) without a plan, in the order of their first run."""
    found: dict[tuple[str, str], list[RunRecord]] = {}
    for record in own:
        cell = record.status.cell or f"{record.resolved.slug}-{record.resolved.config_hash}"
        found.setdefault((cell, record.status.arm or ""), []).append(record)
    return found


def _planned(plan: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Config hashes (one, or one of every arm) by cell id, in the order of the plan."""
    return {_text(item, "id"): _hashes(item) for item in _items(plan, "cells")}


def _hashes(cell: Mapping[str, Any]) -> tuple[str, ...]:
    arms = cell.get("by_arm")
    runs = arms.values() if isinstance(arms, Mapping) else ()
    found = [_text(run, "config_hash") for run in runs if isinstance(run, Mapping)]
    return tuple(dict.fromkeys(found)) or (_text(cell, "config_hash"),)


def _items(plan: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    items = plan.get(key, [])
    if not isinstance(items, list):
        return []
    return [item for item in items if isinstance(item, Mapping)]


def _text(item: Mapping[str, Any], key: str) -> str:
    value = item.get(key, "")
    return value if isinstance(value, str) else ""
