"""Which cell the others are compared with: named by the reader, or chosen by a stated rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.errors import UsageError
from bench.spec.engine_table import TABLE
from reports.views.cells import Cell

ENGINE_PREFERENCE = tuple(row.name for row in sorted(TABLE, key=lambda row: not row.established))
"""Established engines first, in the order of the table; the one under test behind them."""


def rule_for(cells: Sequence[Cell]) -> str:
    """How `choose_reference` chooses, in words; of the engines those that are there."""
    there = {cell.resolved.engine.name for cell in cells}
    known = [name for name in ENGINE_PREFERENCE if name in there]
    engines = f"then the engines in the order {', '.join(known)}, " if len(known) > 1 else ""
    return (
        f"the widest dtypes first, then weights that are not quantised, {engines}"
        "then the fewest settings of the engine that are not its defaults, then the order of the "
        "sweep"
    )


_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def choose_reference(
    cells: Sequence[Cell], named: str | None, usable: Callable[[Cell], bool]
) -> Cell | None:
    """The reference among `cells`; None if no cell is usable.

    Args:
        cells: in the order of the sweep.
        named: name of the wanted cell, or None for the rule of `rule_for`.
        usable: whether a cell has the numbers that are to be compared.

    Raises:
        UsageError: `named` is no cell, or has no number to compare with.
    """
    if named is not None:
        same = [cell for cell in cells if cell.name == named]
        if not same:
            known = ", ".join(cell.name for cell in cells) or "none"
            raise UsageError(f"no cell {named!r} to compare with; expected one of: {known}")
        if not usable(same[0]):
            raise UsageError(f"cell {named!r} has no finished, steady run to compare with")
        return same[0]
    candidates = [cell for cell in cells if usable(cell)]
    return min(candidates, key=_rank, default=None)


def unusual_settings(cell: Cell) -> int:
    """How many of the engine's own settings are not its defaults."""
    settings = cell.resolved.engine.settings
    fields = type(settings).model_fields.items()
    return sum(getattr(settings, name) != field.default for name, field in fields)


def _rank(cell: Cell) -> tuple[int, bool, int, int]:
    """Small is preferred; `min` keeps the first of equals, which is the sweep's order."""
    dtypes = cell.resolved.dtypes
    names = (dtypes.compute, dtypes.main_grads, dtypes.grad_comm, dtypes.main_params)
    width = sum(_BYTES[name or dtypes.compute] for name in names)
    engine = cell.resolved.engine.name
    known = engine in ENGINE_PREFERENCE
    quantised = (cell.resolved.engine.setting("recipe") or "none") != "none"
    place = ENGINE_PREFERENCE.index(engine) if known else len(ENGINE_PREFERENCE)
    return -width, quantised, place, unusual_settings(cell)
