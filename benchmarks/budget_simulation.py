"""The budgeted gate, start to end: false alarms, power, and what it costs. Simulated.

    python -m benchmarks.budget_simulation                     # every table, 2,000 gates for alarms
    python -m benchmarks.budget_simulation --gates 100 alarms  # a taste

A gate has three cells and a budget; each block takes a fixed time. What is measured next, when it
is decided and how is the product's own code: `standings_of` and `next_cell` of reports.gates.budget
after every block. So are the numbers of a run: its simulated steps go through steady window and
summary, those of arms that take turns through `reports.gates.turned_starts`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from bench.derive.metrics import STEP_TIME, default_rules
from benchmarks.gate_simulation import STEPS, Rate, run_medians, simulated_record
from benchmarks.simulated_steps import MODELS, NoiseModel, launch_level, machine_levels, steps_of
from reports.gates.budget import Standing, next_cell, standings_of
from reports.gates.judgement import Case
from reports.gates.policy import DEFAULT_ALPHA
from reports.gates.turned_starts import TurnedStart
from reports.statistics.interval import subset_means, trimmed

CELLS = ("one", "two", "three")
BUDGET_SECONDS = 600.0
STEPPING_SECONDS = 1.8
SLOT_SECONDS = 0.3
NAMES = ("plain", "bimodal", "drifting", "throttled", "busy", "heavy-tailed", "all at once")

_FIXED_LOOKS = range(6, 15)


@dataclass(frozen=True)
class Ended:
    """How one gate ended."""

    standing: tuple[Standing, ...]
    seconds: float

    def any(self, *verdicts: str) -> bool:
        """Whether a cell has one of these verdicts."""
        return any(one.verdict in verdicts for one in self.standing)


@dataclass(frozen=True)
class Way:
    """How a block is made. seconds: what it takes, of which steps of one arm `STEPPING_SECONDS`."""

    turns: int
    seconds: float

    def steps_at(self, head_first: bool) -> tuple[np.ndarray, np.ndarray]:
        """Seconds from the start of the block to every step of base and head."""
        each = STEPPING_SECONDS / STEPS
        if self.turns == 1:
            first = self.seconds / 2 - STEPPING_SECONDS + each * np.arange(STEPS)
            second = first + self.seconds / 2
            return (second, first) if head_first else (first, second)
        clock = self.seconds - 2 * STEPPING_SECONDS
        times: tuple[list[float], list[float]] = ([], [])
        turn_of = np.arange(STEPS) * self.turns // STEPS
        for turn in range(self.turns):
            for place in range(2):
                arm = place ^ int(head_first) ^ (turn % 2)
                count = int((turn_of == turn).sum())
                times[arm].extend(clock + each * np.arange(count))
                clock += each * count
        return np.array(times[0]), np.array(times[1])


ALONE = Way(1, 15.0)
IN_TURNS = Way(8, 12.6)


class Machine:
    """One session on a simulated machine: blocks of any cell, in the order they are asked for."""

    def __init__(
        self, rng: np.random.Generator, model: NoiseModel, way: Way, seconds: float
    ) -> None:
        self._rng, self._model, self._way = rng, model, way
        slots = int((seconds + 2 * way.seconds) / SLOT_SECONDS) + 1
        per_run = round(ALONE.seconds / 2 / SLOT_SECONDS)
        self._levels = machine_levels(rng, model, slots, per_run)
        self._clock = 0.0

    def block(self, effect: float) -> tuple[float | None, float | None]:
        """Base and head, in drawn order; None for a run that found no steady state."""
        head_first = bool(self._rng.integers(0, 2))
        runs = []
        for arm, at in enumerate(self._way.steps_at(head_first)):
            level = self._levels[((self._clock + at) / SLOT_SECONDS).astype(int)]
            level = level * launch_level(self._rng, self._model) * (effect if arm else 1.0)
            runs.append(100.0 * level * steps_of(self._rng, self._model, STEPS))
        self._clock += self._way.seconds
        if self._way.turns == 1:
            found = run_medians(np.array(runs))
            return found.get(0), found.get(1)
        base, head = (simulated_record(times, self._way.turns) for times in runs)
        start = TurnedStart.of(base, head, lambda ranks: ranks[0].milliseconds)
        return (None, None) if start is None else (start.base, start.head)


def budgeted_gate(
    rng: np.random.Generator,
    model: NoiseModel,
    way: Way,
    *,
    effects: Sequence[float] = (1.0, 1.0, 1.0),
    tolerance: float = 0.02,
    budget_seconds: float = BUDGET_SECONDS,
) -> Ended:
    """One gate: blocks until everything is decided or the time is spent.

    Args:
        rng: all randomness.
        model: the noise.
        way: how blocks are made.
        effects: true time ratio head / base of each cell.
        tolerance: of the verdict.
        budget_seconds: of all blocks.
    """
    rule = default_rules()[STEP_TIME.name]
    machine = Machine(rng, model, way, budget_seconds)
    sides: dict[str, tuple[dict[int, float], dict[int, float]]] = {c: ({}, {}) for c in CELLS}
    made: Counter[str] = Counter()
    seconds = dict.fromkeys(CELLS, way.seconds)
    standing: list[Standing] = []
    while True:
        left = budget_seconds - way.seconds * made.total()
        without = [cell for cell in CELLS if not made[cell]]
        cell = next_cell(standing, seconds, left, without_block=without)
        if cell is None:
            return Ended(tuple(standing), way.seconds * made.total())
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


def simulated(name: str, gates: int, seed: int, way: Way = ALONE, **how: object) -> list[Ended]:
    """So many gates on the machine of one noise model."""
    rng = np.random.default_rng(seed)
    return [budgeted_gate(rng, MODELS[name], way, **how) for _ in range(gates)]  # type: ignore[arg-type]


def peeking_alarms(name: str, gates: int, seed: int) -> Rate:
    """The ordinary interval of one cell, looked at after each of 6 to 14 blocks."""
    rng = np.random.default_rng(seed)
    alarms = 0
    for _ in range(gates):
        machine = Machine(rng, MODELS[name], ALONE, ALONE.seconds * _FIXED_LOOKS.stop)
        found: list[float] = []
        while len(found) < _FIXED_LOOKS.stop - 1:
            base, head = machine.block(1.0)
            if base and head:
                found.append(float(np.log(head / base)))
            interval = trimmed(subset_means(found), 0.05) if len(found) in _FIXED_LOOKS else None
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
    return float(np.median([one.seconds for one in ended])) / 60


def _ways(name: str, gates: int, seed: int) -> str:
    """One cell within five minutes, made in either way."""
    gates, lines = max(20, gates // 10), []
    for way in (ALONE, IN_TURNS):
        row = []
        for effect in (1.0, *EFFECTS):
            ended = simulated(name, gates, seed, way, effects=(1.0, effect, 1.0), tolerance=0.05)
            wanted = "equivalent" if effect == 1 else "regressed"
            found = sum(one.standing[1].verdict == wanted for one in ended)
            row.append(f"{found / gates:.0%}")
        alarms = sum(
            one.any("regressed", "improved")
            for one in simulated(name, gates, seed + 1, way, tolerance=0.0)
        )
        row.append(f"{alarms / gates:.1%}")
        lines.append(f"| {name} | {way.turns} | " + " | ".join(row) + " |")
    return "\n".join(lines)


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
    "ways": (
        _ways,
        "Tolerance 5 %: one of 3 cells called equivalent (+0 %) or regressed; last, alarms of"
        " identical code at tolerance 0",
        "| noise | turns | +0 % | "
        + " | ".join(f"{effect - 1:+.0%}" for effect in EFFECTS)
        + " | alarms |\n|---|---:|"
        + "---:|" * (len(EFFECTS) + 2),
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
    parser.add_argument("parts", nargs="*", help="alarms, power, ways, verdicts; all if none")
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
