"""What a plan says of the sums of gradients: from which NCCL on they are FP32, and where."""

from __future__ import annotations

from collections.abc import Iterable

from reports.nccl.sums import gradient_sums
from sweeps.plan import Plan

_MOST_NAMED = 3


def sums_text(plan: Plan) -> str:
    """Every kind of reduction once, behind the cells that have it; "" where none needs a word."""
    cells: dict[str, list[str]] = {}
    for cell in plan.cells:
        for one in gradient_sums(cell.resolved):
            summed = "" if one.summed == "unknown" else f"summed {one.summed}: "
            cells.setdefault(f"{one.text}, sent as {one.sent}: {summed}{one.why}", []).append(
                cell.id
            )
    lines = [f"  {text} ({named(names)})" for text, names in cells.items()]
    return "\n".join(["gradient sums", *lines]) if lines else ""


def named(cells: Iterable[str]) -> str:
    """Each once; of many the first few, and how many more."""
    names = list(dict.fromkeys(cells))
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
