"""One colour and hatch per memory category, the same in every figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reports.plots.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, YELLOW

ORDER = (
    "main_weights",
    "compute_weights",
    "gradients",
    "optimizer_state",
    "communication_buffers",
    "activations",
)
_COLOURS = (BLUE, SKY, VERMILLION, ORANGE, GREEN, PURPLE, YELLOW, GREY)
# Lines only: matplotlib draws a dotted hatch as thousands of curves, 150 kB per figure.
_HATCHES = ("", "///", "", "--", "", "\\\\\\", "xx", "")

#: What lasts through a step before what comes and goes: the base of a stack stays flat.
LASTING_FIRST = (
    "main_weights",
    "gradients",
    "optimizer_state",
    "compute_weights",
    "communication_buffers",
    "activations",
)


def in_order(found: Iterable[str], order: Sequence[str] = ORDER) -> list[str]:
    """Known categories in their order, then unknown ones as they came."""
    names = list(dict.fromkeys(found))
    return [name for name in order if name in names] + [n for n in names if n not in order]


def category_look(category: str, others: Iterable[str] = ()) -> tuple[str, str]:
    """Colour and hatch; unknown categories get what `ORDER` leaves, by their place in `others`."""
    names = [*ORDER, *(name for name in others if name not in ORDER)]
    index = names.index(category) if category in names else len(names)
    return _COLOURS[index % len(_COLOURS)], _HATCHES[index % len(_HATCHES)]
