"""The budgeted gate, start to end: false alarms, power, and what it costs. Simulated.

    python -m benchmarks.budget_simulation                     # every table, 2,000 gates for alarms
    python -m benchmarks.budget_simulation --gates 100 alarms  # a taste

A gate has three cells and a budget; each block takes a fixed time. What is measured next, when it
is decided and how is the product's own code: `standings_of` and `next_cell` of reports.gates.budget
after every block. Run medians are those of the product too: for each noise model, 1,000 runs of 30
simulated steps go through steady window and summary, and the runs of all gates draw from them. (A
factor on all steps of a run is a factor on its median, which benchmarks.gate_simulation tests.)
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bench.derive.metrics import STEP_TIME, default_rules
from benchmarks.gate_simulation import STEPS, Rate, run_medians
from benchmarks.simulated_steps import MODELS, NoiseModel, launch_level, machine_levels, steps_of
from reports.gates.budget import Standing, next_cell, standings_of
from reports.gates.judgement import Case
from reports.gates.policy import DEFAULT_ALPHA
from reports.statistics.interval import paired_interval

CELLS = ("one", "two", "three")
BUDGET_SECONDS = 600.0
BLOCK_SECONDS = 15.0
POOL = 1000
NAMES = ("plain", "bimodal", "drifting", "throttled", "heavy-tailed", "all at once")

_FIXED_LOOKS = range(6, 15)


@dataclass(frozen=True)
class Ended:
    """How one gate ended."""

    standing: tuple[Standing, ...]
    blocks: int

    def any(self, *verdicts: str) -> bool:
        """Whether a cell has one of these verdicts."""
        return any(one.verdict in verdicts for one in self.standing)


class Machine:
    """One session on a simulated machine: blocks of any cell, in the order they are asked for."""

    def __init__(
        self, rng: np.random.Generator, model: NoiseModel, pool: np.ndarray, slots: int
    ) -> None:
        self._rng, self._model, self._pool = rng, model, pool
        self._levels = machine_levels(rng, model, slots)
        self._slot = 0

    def block(self, effect: float) -> tuple[float | None, float | None]:
        """Base and head, in drawn order; None for a run that found no steady state."""
        times: list[float | None] = [None, None]
        head_first = bool(self._rng.integers(0, 2))
        for place in range(2):
            arm = place ^ int(head_first)
            inside = float(self._pool[self._rng.integers(0, len(self._pool))])
            level = self._levels[self._slot] * launch_level(self._rng, self._model)
            self._slot += 1
            if not np.isnan(inside):
                times[arm] = 100.0 * (effect if arm else 1.0) * level * inside
        return times[0], times[1]


@lru_cache
def pool_of(model: NoiseModel, seed: int) -> np.ndarray:
    """Medians of runs around 1, by the product's summary; NaN for those that are not steady."""
    rng = np.random.default_rng([seed, 17])
    runs = 100.0 * np.array([steps_of(rng, model, STEPS) for _ in range(POOL)])
    found = run_medians(runs)
    return np.array([found.get(index, np.nan) for index in range(POOL)]) / 100.0


def budgeted_gate(
    rng: np.random.Generator,
    model: NoiseModel,
    pool: np.ndarray,
    *,
    effects: Sequence[float] = (1.0, 1.0, 1.0),
    tolerance: float = 0.02,
    budget_seconds: float = BUDGET_SECONDS,
) -> Ended:
    """One gate: blocks until everything is decided or the time is spent.

    Args:
        rng: all randomness.
        model: the noise.
        pool: of `pool_of`.
        effects: true time ratio head / base of each cell.
        tolerance: of the verdict.
        budget_seconds: of which a block takes `BLOCK_SECONDS`.
    """
    rule = default_rules()[STEP_TIME.name]
    machine = Machine(rng, model, pool, 2 * int(budget_seconds / BLOCK_SECONDS) + 2)
    sides: dict[str, tuple[dict[int, float], dict[int, float]]] = {c: ({}, {}) for c in CELLS}
    made: Counter[str] = Counter()
    seconds = dict.fromkeys(CELLS, BLOCK_SECONDS)
    standing: list[Standing] = []
    while True:
        left = budget_seconds - BLOCK_SECONDS * made.total()
        without = [cell for cell in CELLS if not made[cell]]
        cell = next_cell(standing, seconds, left, without_block=without)
        if cell is None:
            return Ended(tuple(standing), made.total())
        times = machine.block(effects[CELLS.index(cell)])
        for side, value in zip(sides[cell], times, strict=True):
            if value is not None:
                side[made[cell]] = value
        made[cell] += 1
        cases = [
            Case(name, base, head, True, tolerance, sequential=True)
            for name, (base, head) in sides.items()
            if made[name]
        ]
        standing = standings_of(cases, STEP_TIME.name, rule, DEFAULT_ALPHA, len(CELLS))


def simulated(name: str, gates: int, seed: int, **how: object) -> list[Ended]:
    """So many gates on the machine of one noise model."""
    model = MODELS[name]
    pool, rng = pool_of(model, seed), np.random.default_rng(seed)
    return [budgeted_gate(rng, model, pool, **how) for _ in range(gates)]  # type: ignore[arg-type]


def peeking_alarms(name: str, gates: int, seed: int) -> Rate:
    """The ordinary interval of one cell, looked at after each of 6 to 14 blocks."""
    model = MODELS[name]
    pool, rng = pool_of(model, seed), np.random.default_rng(seed)
    alarms = 0
    for _ in range(gates):
        machine = Machine(rng, model, pool, 64)
        found: list[float] = []
        while len(found) < _FIXED_LOOKS.stop - 1:
            base, head = machine.block(1.0)
            if base and head:
                found.append(float(np.log(head / base)))
            interval = paired_interval(found, 0.05) if len(found) in _FIXED_LOOKS else None
            if interval is not None and not interval[0] <= 0 <= interval[1]:
                alarms += 1
                break
    return Rate(alarms, gates)


def _alarms(name: str, gates: int, seed: int) -> str:
    rates = [
        Rate(sum(one.any("regressed", "improved") for one in ended), len(ended))
        for tolerance, count in ((0.0, gates), (0.02, max(20, gates // 10)))
        for ended in [simulated(name, count, seed, tolerance=tolerance)]
    ]
    peeked = peeking_alarms(name, max(20, gates // 4), seed)
    return f"| {name} | {rates[0]!s} | {rates[1].value:.1%} | {peeked.value:.1%} |"


def _power(name: str, gates: int, seed: int) -> str:
    gates, lines = max(20, gates // 10), []
    for tolerance in (0.02, 0.05):
        row = []
        for effect in EFFECTS:
            ended = simulated(name, gates, seed, effects=(1.0, effect, 1.0), tolerance=tolerance)
            found = sum(one.standing[1].verdict == "regressed" for one in ended)
            row.append(f"{found / gates:.0%} ({_minutes(ended):.1f})")
        lines.append(f"| {name} | {tolerance:.0%} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _verdicts(name: str, gates: int, seed: int) -> str:
    gates, row = max(20, gates // 10), []
    for tolerance in (0.02, 0.05, 0.10):
        ended = simulated(name, gates, seed, tolerance=tolerance)
        equal = sum(s.verdict == "equivalent" for one in ended for s in one.standing)
        row.append(f"{equal / gates / len(CELLS):.0%} ({_minutes(ended):.1f})")
    return f"| {name} | " + " | ".join(row) + " |"


def _minutes(ended: Sequence[Ended]) -> float:
    return float(np.median([one.blocks for one in ended])) * BLOCK_SECONDS / 60


EFFECTS = (1.03, 1.05, 1.10, 1.15)
PARTS = {
    "alarms": (
        _alarms,
        "A/A, 3 cells, 10 min: gates in which any cell claims a change",
        "| noise | tolerance 0 (95 % interval) | tolerance 2 % | looked at with the plain test |\n"
        "|---|---:|---:|---:|",
    ),
    "power": (
        _power,
        "One of 3 cells slower: found (median minutes until all is decided)",
        "| noise | tolerance | "
        + " | ".join(f"{effect - 1:+.0%}" for effect in EFFECTS)
        + " |\n|---|---:|"
        + "---:|" * len(EFFECTS),
    ),
    "verdicts": (
        _verdicts,
        "Identical code: cells called equivalent (median minutes until all is decided)",
        "| noise | tolerance 2 % | 5 % | 10 % |\n|---|---:|---:|---:|",
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gates", type=int, default=2000, help="for alarms; a tenth for the rest")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--noise", nargs="+", choices=NAMES, default=NAMES, metavar="MODEL")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("parts", nargs="*", help="alarms, power, verdicts; all if none")
    asked = parser.parse_args(arguments)
    begun = time.monotonic()
    with ProcessPoolExecutor(asked.workers) as workers:
        for part in asked.parts or PARTS:
            row, title, head = PARTS[part]
            print(f"\n{title}; --gates {asked.gates}\n\n{head}", flush=True)
            tasks = [workers.submit(row, name, asked.gates, asked.seed) for name in asked.noise]
            for task in tasks:
                print(task.result(), flush=True)
    print(f"\n{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
