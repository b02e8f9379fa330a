"""Step times of runs that never ran: autocorrelated, drifting, heavy-tailed, noisy from run to run.

    milliseconds = base * effect * machine(slot) * run * warm-up(step) * drift(step) * noise(step)

machine(slot) drifts over the session, wanders (AR(1) over the runs in the order they are made), may
be throttled for a stretch and have other work now and then; `run` is drawn once per run and may be
that of a slow launch; noise(step) is AR(1) with outliers. Pure; randomness comes in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

WARM_UP = (4.0, 1.6, 1.2)
"""Factors of the first steps of every run."""


@dataclass(frozen=True)
class NoiseModel:
    """Relative sizes (0.01 is 1 %).

    run: standard deviation from run to run. tail: degrees of freedom of Student's t for it (scaled
    to the same standard deviation), None for a normal distribution. wander: standard deviation of
    the machine's AR(1), `wander_memory` its coefficient from one run to the next. session_drift:
    slow-down of the machine from the first to the last run. slow_launches, slow_factor: share of
    runs that are slower as a whole, and by how much. throttled, throttle_factor: share of the
    session, at a drawn place, in which the machine is slower. busy, busy_runs, busy_factor: share
    of the time in which it has other work, for how many runs at a time (mean), and how much slower
    it is then. step, step_memory: standard deviation
    and AR(1) coefficient of steps. run_drift: slow-down within a run. outlier_chance,
    outlier_factor: single steps that take longer.
    """

    run: float = 0.01
    tail: float | None = None
    wander: float = 0.0
    wander_memory: float = 0.0
    session_drift: float = 0.0
    slow_launches: float = 0.0
    slow_factor: float = 1.1
    throttled: float = 0.0
    throttle_factor: float = 1.3
    busy: float = 0.0
    busy_runs: float = 0.5
    busy_factor: float = 1.25
    step: float = 0.01
    step_memory: float = 0.0
    run_drift: float = 0.0
    outlier_chance: float = 0.0
    outlier_factor: float = 2.0


MODELS: dict[str, NoiseModel] = {
    "plain": NoiseModel(),
    "autocorrelated": NoiseModel(wander=0.01, wander_memory=0.8, step=0.02, step_memory=0.8),
    "drifting": NoiseModel(session_drift=0.10, run_drift=0.03),
    "heavy-tailed": NoiseModel(tail=3.0, outlier_chance=0.06, outlier_factor=2.5),
    "bimodal": NoiseModel(slow_launches=0.3),
    "throttled": NoiseModel(throttled=0.3, step_memory=0.5),
    "busy": NoiseModel(busy=0.3),
    "all at once": NoiseModel(
        tail=3.0,
        wander=0.01,
        wander_memory=0.8,
        session_drift=0.10,
        step=0.02,
        step_memory=0.7,
        run_drift=0.02,
        outlier_chance=0.06,
        outlier_factor=2.5,
    ),
}


def session(
    rng: np.random.Generator,
    model: NoiseModel,
    *,
    blocks: int,
    steps: int,
    effect: float,
    randomised: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Interleaved runs of two arms on one machine.

    Args:
        rng: all randomness.
        model: the noise.
        blocks: pairs of runs.
        steps: per run.
        effect: true time ratio of head to base, 1.05 for a slow-down of 5 %.
        randomised: whether the first arm of a block is drawn; otherwise base is always first.

    Returns:
        Milliseconds of base and of head, each of shape (blocks, steps).
    """
    machine = machine_levels(rng, model, 2 * blocks)
    times: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for block in range(blocks):
        head_first = randomised and bool(rng.integers(0, 2))
        for place in range(2):
            arm = place ^ int(head_first)
            level = 100.0 * (effect if arm else 1.0) * machine[2 * block + place]
            times[arm].append(level * _run(rng, model, steps))
    return np.array(times[0]), np.array(times[1])


def machine_levels(
    rng: np.random.Generator, model: NoiseModel, slots: int, per_run: int = 1
) -> np.ndarray:
    """The machine's factor in each slot of a session, of which a run takes `per_run`."""
    wander = _ar1(rng, slots, model.wander, model.wander_memory ** (1 / per_run))
    drift = 1.0 + model.session_drift * np.linspace(0.0, 1.0, slots)
    hot = round(model.throttled * slots)
    if hot:
        first = int(rng.integers(0, slots - hot + 1))
        drift[first : first + hot] *= model.throttle_factor
    slot = 0
    while model.busy > 0 and slot < slots:
        mean = model.busy_runs * per_run
        slot += 1 + int(rng.exponential(mean * (1 - model.busy) / model.busy))
        length = 1 + int(rng.exponential(mean))
        drift[slot : slot + length] *= model.busy_factor
        slot += length
    return np.asarray(drift * np.exp(wander))


def _run(rng: np.random.Generator, model: NoiseModel, steps: int) -> np.ndarray:
    return launch_level(rng, model) * steps_of(rng, model, steps)


def launch_level(rng: np.random.Generator, model: NoiseModel) -> float:
    """What all steps of one run have in common."""
    slow = model.slow_launches > 0 and rng.random() < model.slow_launches
    level = math.exp(model.run * _standardised(rng, model.tail))
    return level * (model.slow_factor if slow else 1.0)


def steps_of(rng: np.random.Generator, model: NoiseModel, steps: int) -> np.ndarray:
    """Steps of one run around 1, warm-up included."""
    noise = np.exp(_ar1(rng, steps, model.step, model.step_memory))
    drift = 1.0 + model.run_drift * np.linspace(0.0, 1.0, steps)
    outliers = np.where(rng.random(steps) < model.outlier_chance, model.outlier_factor, 1.0)
    slow = np.ones(steps)
    slow[: len(WARM_UP)] = WARM_UP[:steps]
    return np.asarray(noise * drift * outliers * slow)


def _standardised(rng: np.random.Generator, tail: float | None) -> float:
    """A draw of standard deviation 1."""
    if tail is None:
        return float(rng.standard_normal())
    return float(rng.standard_t(tail)) / math.sqrt(tail / (tail - 2))


def _ar1(rng: np.random.Generator, count: int, spread: float, memory: float) -> np.ndarray:
    """A stationary AR(1) series with standard deviation `spread`."""
    values = np.empty(count)
    current = spread * float(rng.standard_normal())
    fresh = spread * math.sqrt(1 - memory**2)
    for index in range(count):
        values[index] = current
        current = memory * current + fresh * float(rng.standard_normal())
    return values
