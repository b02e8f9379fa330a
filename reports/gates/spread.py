"""Where the spread of a comparison comes from: starts of the ranks, or their steps.

    log(head / base) of a block = change + both starts + what the steps of both runs leave open

What the steps leave open is known from parts of the steady window; the rest of the variance comes
with the start (addresses, placement, a slow mode, the machine at that moment). A start is the unit
of replication: its share does not shrink with more steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median, variance

from bench.derive.metrics import STEP_TIME
from reports.gates.pairing import Pair
from reports.renderers import quantity

_FEWEST = 3
_WORTH_SAYING = 1.15
_MOST_TIMES_THE_STEPS = 8.0


@dataclass(frozen=True)
class BlockSpread:
    """Variances of one block's log ratio, and what a run costs.

    total: as measured, over blocks. steps: the part that the steps of both runs leave open.
    startup_seconds, stepping_seconds: of one run.
    """

    total: float
    steps: float
    startup_seconds: float
    stepping_seconds: float

    @property
    def starts(self) -> float:
        """The part that comes with the start of the ranks."""
        return max(0.0, self.total - self.steps)

    @property
    def deviation(self) -> float:
        """Standard deviation of one block's log ratio."""
        return math.sqrt(self.total)

    @property
    def step_factor(self) -> float:
        """How many times the steps per run would tell most in the same time.

        A run costs startup + n steps and has the variance starts + steps / n; the product is
        smallest at n = sqrt(steps startup / (starts stepping)), in units of today's n.
        """
        if not self.stepping_seconds or not self.steps:
            return 1.0
        if not self.starts:
            return _MOST_TIMES_THE_STEPS
        best = math.sqrt(self.steps * self.startup_seconds / (self.starts * self.stepping_seconds))
        return min(max(best, 1 / _MOST_TIMES_THE_STEPS), _MOST_TIMES_THE_STEPS)

    @property
    def gain(self) -> float:
        """How much longer today's number of steps takes to tell as much as `step_factor` times."""
        factor = self.step_factor
        now = (self.starts + self.steps) * (self.startup_seconds + self.stepping_seconds)
        then = (self.starts + self.steps / factor) * (
            self.startup_seconds + self.stepping_seconds * factor
        )
        return now / then if then > 0 else 1.0


def spread_of(pair: Pair) -> BlockSpread | None:
    """Of the step times of a pair that was run in blocks; None with fewer than three of them."""
    base, head = pair.base.of(STEP_TIME), pair.head.of(STEP_TIME)
    timings = [side.timing for side in (pair.base, pair.head)]
    blocks = sorted(set(base) & set(head) & set(timings[0]) & set(timings[1]))
    if len(blocks) < _FEWEST:
        return None
    both = [(timings[0][block], timings[1][block]) for block in blocks]
    runs = [run for pair_of_runs in both for run in pair_of_runs]
    return BlockSpread(
        variance([math.log(head[block] / base[block]) for block in blocks]),
        fmean(one.step_error**2 + other.step_error**2 for one, other in both),
        max(0.0, median(run.wall_seconds - run.stepping_seconds for run in runs)),
        median(run.stepping_seconds for run in runs),
    )


def spread_text(spread: BlockSpread, train_steps: int | None) -> str:
    """Where the spread comes from, and whether other than `train_steps` per run would help."""
    whole = (spread.starts + spread.steps) or 1.0
    wall = spread.startup_seconds + spread.stepping_seconds
    text = (
        f"one block varies by {quantity.share(spread.deviation)}: "
        f"{quantity.share(spread.starts / whole, 0)} from start to start, "
        f"{quantity.share(spread.steps / whole, 0)} by its steps; start-up takes "
        f"{spread.startup_seconds:.1f} of {wall:.1f} s of a run"
    )
    if train_steps is not None and spread.gain >= _WORTH_SAYING:
        better = max(1, round(train_steps * spread.step_factor))
        text += (
            f"; train.steps = {better} instead of {train_steps} would tell as much in "
            f"{quantity.share(1 / spread.gain, 0)} of the time"
        )
    return text
