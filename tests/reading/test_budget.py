"""Blocks until the clock says stop, then one exact test: which block comes next, false alarms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from recorded_runs import interleaved

from bench.derive.metrics import STEP_TIME
from reports.compare.judge import judge_intervals
from reports.compare.sides import Pair
from sweeps import budget
from sweeps.budget import BlockBudget, next_cell


@pytest.mark.parametrize(
    ("blocks", "seconds", "left", "expected"),
    [
        ({"a": 2, "b": 1, "c": 1}, {"a": 1.0, "b": 1.0}, 9.0, "b"),
        # Nothing is started that does not fit; what is unknown takes as long as the longest.
        ({"a": 2, "b": 1}, {"a": 1.0, "b": 5.0}, 4.0, "a"),
        ({"a": 2, "b": 0}, {"a": 5.0}, 4.0, None),
        ({"a": 0, "b": 0}, {}, 4.0, "a"),
        ({}, {}, 4.0, None),
    ],
)
def test_the_cell_with_the_fewest_blocks_is_next(blocks, seconds, left, expected):
    assert next_cell(blocks, seconds, left) == expected


def test_a_budget_counts_from_its_first_block_and_gives_up_what_was_lost(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(budget, "monotonic", lambda: now[0])
    clock, blocks, ran = BlockBudget(10.0), {"a": 0, "b": 0, "c": 0}, []
    while (cell := clock.next_cell(blocks)) is not None:
        ran.append(cell)
        now[0] += 2.0
        blocks[cell] += cell != "b"
        clock.block_ended(cell, complete=cell != "b")
    assert ran == ["a", "b", "c", "a", "c"]
    assert (clock.blocks, clock.spent_seconds, clock.block_seconds) == (4, 10.0, {"a": 2, "c": 2})


# -- false alarms ------------------------------------------------------------------------------

Noise = Callable[[np.random.Generator], Iterator[float]]
"""Logarithms of step times of one launch after the other, of code that does not differ."""


def drifting(rng: np.random.Generator) -> Iterator[float]:
    level, slope = 0.0, rng.normal(0.0, 0.02)
    while True:
        level += slope + rng.normal(0.0, 0.01)
        yield level + rng.normal(0.0, 0.01)


def bimodal(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield 0.1 * (rng.random() < 0.3) + rng.normal(0.0, 0.01)


def correlated(rng: np.random.Generator) -> Iterator[float]:
    level = 0.0
    while True:
        level = 0.9 * level + rng.normal(0.0, 0.03)
        yield level


def all_at_once(rng: np.random.Generator) -> Iterator[float]:
    for three in zip(drifting(rng), bimodal(rng), correlated(rng), strict=True):
        yield math.fsum(three)


NOISES: dict[str, Noise] = {
    one.__name__: one for one in (drifting, bimodal, correlated, all_at_once)
}


def session(
    rng: np.random.Generator, noise: Noise, cells: str, *, drawn: bool = True
) -> list[Pair]:
    """Cells of equal arms on one machine, measured for a budget; slow launches take longer."""
    launches, left = noise(rng), len(cells) * rng.uniform(15.0, 25.0)
    times: dict[str, list[tuple[float, float]]] = {cell: [] for cell in cells}
    took: dict[str, list[float]] = {}
    while True:
        means = {cell: sum(each) / len(each) for cell, each in took.items()}
        cell = next_cell({name: len(found) for name, found in times.items()}, means, left)
        if cell is None:
            break
        first, second = math.exp(next(launches)), math.exp(next(launches))
        times[cell].append((second, first) if drawn and rng.random() < 0.5 else (first, second))
        took.setdefault(cell, []).append(0.5 + first + second)
        left -= took[cell][-1]
    return [
        interleaved(cell, [base for base, _ in known], [head for _, head in known])
        for cell, known in times.items()
        if known
    ]


def false_alarms(
    noise: Noise, draws: int, cells: str = "ab", tolerance: float = 0.0, *, drawn: bool = True
) -> float:
    """Share of gates that call one of the equal cells changed, at alpha 5 %."""
    rng, wrong = np.random.default_rng(43), 0
    rule = replace(STEP_TIME.rule, tolerance=tolerance)
    for _ in range(draws):
        measured = session(rng, noise, cells, drawn=drawn)
        judged = judge_intervals(measured, STEP_TIME, rule, 0.05)
        wrong += any(one.verdict in ("regressed", "improved") for one in judged)
    return wrong / draws


@pytest.mark.nightly
@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize(
    ("cells", "tolerance", "draws", "most"),
    [
        ("ab", 0.0, 2000, 0.05),
        ("a", STEP_TIME.rule.tolerance, 2000, 0.05),
        # The exact level of one cell is 4.7 to 5.0 %: only many draws tell it from more.
        ("a", 0.0, 20_000, 0.053),
    ],
)
def test_equal_code_is_called_changed_in_at_most_5_percent_of_budgets(
    name, cells, tolerance, draws, most
):
    assert false_alarms(NOISES[name], draws, cells, tolerance) <= most


def test_equal_code_is_seldom_called_changed_within_a_budget():
    """As nightly, of fewer draws, with one seed."""
    assert false_alarms(all_at_once, 200) <= 0.05


def test_the_simulation_sees_that_an_order_which_is_not_drawn_makes_alarms():
    assert false_alarms(drifting, 200, drawn=False) > 0.2
