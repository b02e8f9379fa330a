"""The plan of a sweep as reports read it: nonsense in it costs no more than itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.store import ResultsStore

NOT_RUN = "it was planned and has not run"

Codes = Mapping[tuple[str, str | None], str]
"""Cell and arm -> the code that its runs are to have measured."""


@dataclass(frozen=True)
class PrunedCell:
    """A cell that could not run where the sweep was planned."""

    name: str
    rule: str
    reason: str


@dataclass(frozen=True)
class SweepPlan:
    """What was planned, in the order of the file.

    cells: id -> config hashes, one or one of every arm. codes: what the arms were when the plan was
    made, where it says so. merged: (cell, cell whose runs count for it too).
    repeats: blocks of each cell.
    """

    description: str = ""
    source: str = ""
    cells: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    arms: tuple[str, ...] = ()
    codes: Codes = field(default_factory=dict)
    pruned: tuple[PrunedCell, ...] = ()
    merged: tuple[tuple[str, str], ...] = ()
    repeats: Mapping[str, int] = field(default_factory=dict)

    def not_run(self, cell: str, runs: set[tuple[int, str | None]], arms: Sequence[str]) -> str:
        """The first planned run of a cell that has no record among `runs`; empty if all have."""
        for block in range(self.repeats.get(cell, 0)):
            for arm in arms or (None,):
                if (block, arm) not in runs:
                    name = f"block {block}: {arm}" if arm else f"repeat {block}"
                    return f"{name}: {NOT_RUN}"
        return ""


def plan_of(store: ResultsStore, sweep: str) -> SweepPlan:
    """The plan of `sweep`; an empty one of runs that have none.

    Raises:
        UsageError: it cannot be read, or there is neither a plan nor a run.
    """
    only_runs = sweep not in store.sweeps() and any(store.statuses(sweep))
    return SweepPlan() if only_runs else parsed_plan(store.read_plan(sweep))


def parsed_plan(plan: Mapping[str, Any]) -> SweepPlan:
    """What can be understood of `plan`."""
    arms = _items(plan, "arms")
    return SweepPlan(
        description=_text(plan, "description"),
        source=_text(plan, "source"),
        cells={_text(one, "id"): _hashes(one) for one in _items(plan, "cells") if _text(one, "id")},
        arms=tuple(_text(arm, "name") for arm in arms),
        codes={
            (cell, _text(arm, "name")): str(code)
            for arm in arms
            if isinstance(arm.get("codes"), Mapping)
            for cell, code in arm["codes"].items()
        },
        pruned=tuple(
            PrunedCell(_text(item, "id"), _text(item, "rule"), _text(item, "reason"))
            for item in _items(plan, "pruned")
        ),
        merged=tuple(
            (_text(item, "id"), _text(item, "same_as")) for item in _items(plan, "duplicates")
        ),
        repeats={
            _text(one, "id"): repeats
            for one in _items(plan, "cells")
            if isinstance(repeats := one.get("repeats"), int)
        },
    )


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
