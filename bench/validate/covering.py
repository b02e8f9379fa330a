"""A covering array: few rows in which any two settings, or any three, meet in all their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def covering(
    factors: Mapping[str, Sequence[Any]], is_possible: Callable[[Row], bool], strength: int
) -> list[Row]:
    """Rows in which every `strength` values that go together meet. Greedy: few, not the fewest.

    The same factors give the same rows. factors: values of each, the usual one first.
    is_possible: whether two values go together, where all others are as usual.
    """
    values = {name: [(name, value) for value in factors[name]] for name in factors}
    together = {
        frozenset(pair)
        for one, other in combinations(factors, 2)
        for pair in product(values[one], values[other])
        if is_possible(dict(pair))
    }
    missing = {
        frozenset(group): group
        for names in combinations(factors, strength)
        for group in product(*(values[name] for name in names))
        if all(frozenset(pair) in together for pair in combinations(group, 2))
    }
    rows: list[Row] = []
    while missing:
        row = [*next(iter(missing.values()))]
        for name in factors:
            if name in dict(row):
                continue
            possible = [v for v in values[name] if all(frozenset((v, o)) in together for o in row)]
            groups = [*combinations(row, strength - 1)]
            # The value with which most groups meet that have not met yet.
            new = [sum(frozenset((v, *group)) in missing for group in groups) for v in possible]
            row.append(possible[new.index(max(new))])
        for group in combinations(row, strength):
            missing.pop(frozenset(group), None)
        rows.append({name: dict(row)[name] for name in factors})
    return rows
