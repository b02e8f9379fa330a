"""Numbers as text: one way to write each kind of quantity, with its unit."""

from __future__ import annotations

import math
from collections.abc import Sequence

MISSING = "-"
"""What is shown where nothing was measured; never a zero."""

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP = 1024


def significant(value: float | None, digits: int = 4) -> str:
    """`value` with about `digits` significant digits, thousands separated: 10,925 or 0.04321."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    decimals = max(0, digits - 1 - magnitude)
    if decimals > digits + 3:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{decimals}f}"


def loss(value: float | None) -> str:
    """A loss with the six decimals at which engines are compared by eye, or `nan`."""
    return MISSING if value is None else f"{value:.6f}"


def change(fraction: float | None, decimals: int = 1, *, exact: bool = False) -> str:
    """A relative change with its sign: +3.1 %, -12.0 %; `exact` ones that round to 0: +1.0e-06."""
    if fraction is None or not math.isfinite(fraction):
        return MISSING
    size = share(abs(fraction), decimals)
    if float(size.removesuffix(" %")):
        return ("-" if fraction < 0 else "+") + size
    # A rounded zero has no direction.
    return difference(fraction, signed=True) if exact and fraction else size


def share(fraction: float | None, decimals: int = 1) -> str:
    """A part of a whole: 62.4 %."""
    return MISSING if fraction is None else f"{100 * fraction:.{decimals}f} %"


def ratio(value: float | None) -> str:
    """A ratio of two quantities: 1.048x."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.3f}x"


def difference(value: float | None, *, signed: bool = False) -> str:
    """A small relative difference: 3.2e-06, signed +3.2e-06; exact agreement reads as 0."""
    if value is None or math.isnan(value):
        return MISSING
    return "0" if value == 0 else f"{value:{'+' if signed else ''}.1e}"


def binary_bytes(value: float | None) -> str:
    """Bytes in the largest binary unit that keeps a number of at least 1: 412.3 MiB."""
    if value is None:
        return MISSING
    scaled, unit = float(value), 0
    while abs(scaled) >= _STEP and unit < len(_BINARY_UNITS) - 1:
        scaled, unit = scaled / _STEP, unit + 1
    return f"{scaled:.0f} B" if unit == 0 else f"{scaled:.1f} {_BINARY_UNITS[unit]}"


def milliseconds(value: float | None) -> str:
    """A time to a tenth of a millisecond, below one to three digits: 98.2 or 0.0109."""
    if value is None:
        return MISSING
    return f"{value:.1f}" if value >= 1 else significant(value, 3)


def amount(value: float | None, unit: str) -> str:
    """A metric's value in its unit, which the column's title names."""
    if unit == "bytes":
        return binary_bytes(value)
    if unit == "loss":
        return loss(value)
    if unit == "count":
        return MISSING if value is None else f"{value:,.0f}"
    return share(value) if unit == "share" else significant(value)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: 1 cell, 12 cells."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def first_of(most: int, count: int) -> str:
    """What a figure leaves out: ` The first 24 of 30 cells are drawn.`; "" where it has all."""
    return f" The first {most} of {count} cells are drawn." if count > most else ""


def few(texts: Sequence[str], most: int, joint: str = "; ") -> str:
    """The first texts, and how many more there are: `a; b; and 3 more`."""
    more = len(texts) - most
    return joint.join([*texts[:most], *([f"and {more} more"] if more > 0 else [])])


def duration(seconds: float) -> str:
    """A span of time for people: `48 s`, `3 min 20 s`, `2 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:  # noqa: PLR2004
        shown = [f"{minutes} min"] * bool(minutes) + [f"{rest} s"] * bool(rest or not minutes)
        return " ".join(shown)
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
