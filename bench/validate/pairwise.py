"""A covering array: few rows in which any two settings meet in each of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
_Value = tuple[str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]], is_possible: Callable[[Row], bool]) -> list[Row]:
    """Rows in which every two values that go together meet. Greedy: few rows, not the fewest.

    The same factors give the same rows. factors: values of each, the usual one first.
    is_possible: whether two values go together, where all others are as usual.
    """
    together = {
        frozenset(pair): None
        for one, other in combinations(factors, 2)
        for pair in product(_values(factors, one), _values(factors, other))
        if is_possible(dict(pair))
    }
    missing, rows = dict(together), []
    while missing:
        row = list(_in_order(next(iter(missing)), factors))
        for name in factors:
            if name not in dict(row):
                row.append(_best(_values(factors, name), row, together, missing))
        for pair in combinations(row, 2):
            missing.pop(frozenset(pair), None)
        rows.append({name: dict(row)[name] for name in factors})
    return rows


def _best(
    values: list[_Value],
    row: list[_Value],
    together: Mapping[frozenset[_Value], None],
    missing: Mapping[frozenset[_Value], None],
) -> _Value:
    """Of the values that go with those in the row, the one that most of them have not met yet."""
    possible = [v for v in values if all(frozenset((v, one)) in together for one in row)]
    return max(possible, key=lambda v: sum(frozenset((v, one)) in missing for one in row))


def _values(factors: Mapping[str, Sequence[Any]], name: str) -> list[_Value]:
    return [(name, value) for value in factors[name]]


def _in_order(pair: frozenset[_Value], factors: Mapping[str, Sequence[Any]]) -> list[_Value]:
    return sorted(pair, key=lambda value: list(factors).index(value[0]))
