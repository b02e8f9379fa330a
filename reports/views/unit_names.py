"""Units as a reader knows them: what kind of block, and many of them in few words."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bench.spec import BLOCK_LETTERS, ModelShape

_NUMBERED = re.compile(r"(?P<stem>.*\.)(?P<number>\d+)")
_MOST_NAMED = 6
ROOT = "root"


def unit_name(unit: str, shape: ModelShape | None) -> str:
    """`layers.3 (attention)` in a hybrid, else the name itself; the root is `root`."""
    if unit in ("", "(root)"):
        return ROOT
    kind = _kind(unit, shape)
    return unit if kind is None else f"{unit} ({kind})"


def unit_names(units: Iterable[str], shape: ModelShape | None) -> str:
    """Several of one kind: `layers.0, 2, 5, 7 (Mamba-2)`."""
    distinct = list(dict.fromkeys(units))
    numbered = [_NUMBERED.fullmatch(unit) for unit in distinct]
    stems = {match["stem"] for match in numbered if match}
    kinds = {_kind(unit, shape) for unit in distinct}
    if len(distinct) == 1 or len(stems) != 1 or not all(numbered) or len(kinds) != 1:
        return ", ".join(unit_name(unit, shape) for unit in distinct)
    numbers = [match["number"] for match in numbered if match]
    if len(numbers) > _MOST_NAMED:
        numbers = [*numbers[: _MOST_NAMED - 1], f"... {numbers[-1]}: {len(numbers)} units"]
    (kind,) = kinds
    return f"{stems.pop()}{', '.join(numbers)}" + ("" if kind is None else f" ({kind})")


def _kind(unit: str, shape: ModelShape | None) -> str | None:
    match = _NUMBERED.fullmatch(unit)
    if shape is None or shape.hybrid is None or match is None or match["stem"] != "layers.":
        return None
    place = int(match["number"])
    pattern = shape.hybrid.pattern
    return BLOCK_LETTERS.get(pattern[place]) if place < len(pattern) else None
