"""Cells that differ in one switch of the engine only: what it changes in numbers and memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.record import RunRecord
from bench.spec import POOLS
from reports.views.cells import Cell
from reports.views.reference import unusual_settings

#: Name of a switch -> the settings that make it up.
SWITCHES: Final = {
    "allocator": ("allocator", "double_buffer", "pool_slots"),
    "transport": ("transport",),
    "fine_grained_gather": ("fine_grained_gather",),
    "gather_precision": ("gather_precision",),
}


@dataclass(frozen=True)
class SwitchDifference:
    """A cell against the first of its group; None where it cannot be said.

    Relative differences are the largest over steps and ranks; exact: every loss and gradient norm
    of every rank has the same bits.
    """

    cell: Cell
    exact: bool
    loss: float | None
    grad_norm: float | None
    first_grad_norm: float | None
    peak_bytes: int | None


@dataclass(frozen=True)
class SwitchGroup:
    """Cells that are equal but for `switch`; `base` has its default, or is nearest to it."""

    switch: str
    base: SwitchDifference
    others: tuple[SwitchDifference, ...]

    @property
    def must_agree(self) -> bool:
        """Whether the switch may not change a single bit of any loss."""
        return self.switch != "transport"


def switch_groups(cells: Sequence[Cell]) -> list[SwitchGroup]:
    """Finished cells that differ in one switch only, group by group, switch by switch."""
    found = []
    for switch, settings in SWITCHES.items():
        groups: dict[str, list[Cell]] = {}
        for cell in cells:
            if cell.finished:
                groups.setdefault(_without(cell, settings), []).append(cell)
        for members in groups.values():
            if len({_values(cell, settings) for cell in members}) > 1:
                base = min(members, key=unusual_settings)
                others = [cell for cell in members if cell is not base]
                differences = (_difference(cell, base) for cell in others)
                found.append(SwitchGroup(switch, _difference(base, base), tuple(differences)))
    return found


def setting_text(cell: Cell, switch: str) -> str:
    """The value of a switch in a cell: `max_pool, 2 slots`."""
    engine = cell.resolved.engine
    value = engine.setting(switch)
    pooled = switch == "allocator" and value in POOLS
    return f"{value}, {engine.setting('pool_slots')} slots" if pooled else str(value)


def _without(cell: Cell, settings: Sequence[str]) -> str:
    document = json.loads(cell.resolved.canonical_json())
    for setting in settings:
        document["engine"].pop(setting, None)
    return json.dumps(document, sort_keys=True)


def _values(cell: Cell, settings: Sequence[str]) -> tuple[object, ...]:
    return tuple(cell.resolved.engine.setting(setting) for setting in settings)


def _difference(cell: Cell, base: Cell) -> SwitchDifference:
    one, other = cell.finished[0].record, base.finished[0].record
    losses = _pairs(one, other, "loss")
    norms = _pairs(one, other, "grad_norm")
    summary = cell.finished[0].summary
    return SwitchDifference(
        cell=cell,
        exact=bool(losses) and all(a == b for a, b in (*losses, *norms)),
        loss=_largest(losses),
        grad_norm=_largest(norms),
        first_grad_norm=_largest(norms[:1]),
        peak_bytes=summary.ledger_peak_bytes if summary.ledger_is_measured else None,
    )


def _pairs(one: RunRecord, other: RunRecord, field: str) -> list[tuple[float, float]]:
    """Values of both runs, step by step and rank by rank; only steps that both have."""
    pairs = []
    for rank in sorted(one.steps.keys() & other.steps.keys()):
        for a, b in zip(one.steps[rank], other.steps[rank], strict=False):
            first, second = getattr(a, field), getattr(b, field)
            if first is not None and second is not None:
                pairs.append((float(first), float(second)))
    return pairs


def _largest(pairs: Sequence[tuple[float, float]]) -> float | None:
    if not pairs:
        return None
    return max(abs(a - b) / abs(b) if b else abs(a - b) for a, b in pairs)
