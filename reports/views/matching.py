"""Which cell of one side belongs to which of the other: by configuration, not by name. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports.views.cells import Cell

_UNHASHED = frozenset({"launch.timeout_seconds", "launch.hang_seconds"})
"""Limits that cannot change a result; see `ResolvedRun.canonical_json`."""
_Flat = tuple[Cell, Mapping[str, Any]]
"""A cell, and its configuration as of `flat_settings`."""


@dataclass(frozen=True)
class Matching:
    """Pairs (base, head), what found no partner, and the settings that were set aside to match."""

    pairs: tuple[tuple[Cell, Cell], ...]
    unmatched_base: tuple[Cell, ...]
    unmatched_head: tuple[Cell, ...]
    set_aside: tuple[str, ...]


def match(base: Sequence[Cell], head: Sequence[Cell], ignore: Sequence[str] = ()) -> Matching:
    """Pair cells whose configurations agree.

    A lone cell is paired with a lone cell. Otherwise the configurations must be equal; if no two
    are, the settings whose sets of values differ between the sides are the axis under comparison
    and are set aside. A configuration that is then not unique on its side finds no partner.

    Args:
        base: cells of one side.
        head: cells of the other.
        ignore: settings to set aside, as `engine.name`, or whole sections, as `dtypes`; with any,
            nothing is found out automatically.
    """
    before, after = flat_settings(base), flat_settings(head)
    bases, heads = list(zip(base, before, strict=True)), list(zip(head, after, strict=True))
    keys = {key for flat in (*before, *after) for key in flat}
    if ignore:
        return _paired(bases, heads, {key for key in keys if _is_under(key, ignore)})
    if len(base) == len(head) == 1:
        return _paired(bases, heads, set(_differing(before[0], after[0])))
    exact = _paired(bases, heads, set())
    if exact.pairs or not base or not head:
        return exact
    return _paired(bases, heads, {k for k in keys if _values(before, k) != _values(after, k)})


def differing_settings(base: Cell, head: Cell) -> list[str]:
    """`setting: base value, head value` for every setting in which two cells differ."""
    before, after = flat_settings([base])[0], flat_settings([head])[0]
    return [
        f"{key}: {before.get(key)!s}, {after.get(key)!s}"
        for key in _differing(before, after)
        # What only one of two engines has is said by their names.
        if not key.startswith("engine.") or (key in before and key in after)
    ]


def _paired(base: Sequence[_Flat], head: Sequence[_Flat], aside: set[str]) -> Matching:
    bases, heads = _by_key(base, aside), _by_key(head, aside)
    pairs = tuple(
        (cells[0], heads[key][0])
        for key, cells in bases.items()
        if len(cells) == 1 and len(heads.get(key, [])) == 1
    )
    used = {id(cell) for pair in pairs for cell in pair}
    return Matching(
        pairs,
        tuple(cell for cell, _ in base if id(cell) not in used),
        tuple(cell for cell, _ in head if id(cell) not in used),
        tuple(sorted(aside)),
    )


def _by_key(side: Sequence[_Flat], aside: set[str]) -> dict[frozenset[object], list[Cell]]:
    grouped: dict[frozenset[object], list[Cell]] = {}
    for cell, flat in side:
        # An absent setting is one that is open: an engine has only settings of its own.
        known = ((k, repr(v)) for k, v in flat.items() if k not in aside and v is not None)
        grouped.setdefault(frozenset(known), []).append(cell)
    return grouped


def flat_settings(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The configuration of every cell as one level of settings, as `engine.name`."""
    return [_flattened(cell.resolved.model_dump(mode="json")) for cell in cells]


def _flattened(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in document.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(_flattened(value, f"{path}."))
        elif path not in _UNHASHED:
            flat[path] = value
    return flat


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def _values(flats: Sequence[Mapping[str, Any]], key: str) -> set[str]:
    return {repr(flat.get(key)) for flat in flats}


def _is_under(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
