"""Where the spread of a comparison comes from: starts of the ranks, blocks within one, or steps.

    log(head / base) of a block = change + start + block + what the steps of both runs leave open

Estimated by moments (one-way analysis of variance): the mean square between starts holds all
three, the mean square between blocks of one start the last two, and what the steps leave open is
known from parts of the steady window. With one block a start, start and block cannot be told apart.
A start is the unit of replication: its share does not shrink with more blocks or steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median, variance

from bench.derive.metrics import STEP_TIME
from reports.gates.cell_samples import RunTiming
from reports.gates.pairing import Pair
from reports.renderers import quantity

_FEWEST = 3
_WORTH_SAYING = 1.15
_MOST_TIMES_THE_STEPS = 8.0
MOST_BLOCKS_PER_START = 6


@dataclass(frozen=True)
class Spread:
    """Variances of one block's log ratio, and what a run costs.

    total: of one start's sample as it was measured. starts, blocks, steps: its parts; `blocks` is
    None where every start had one block, and then lies in `starts`. blocks_per_start: how many
    blocks a sample was made of. startup_seconds, stepping_seconds: of one run.
    """

    total: float
    starts: float
    blocks: float | None
    steps: float
    blocks_per_start: float
    startup_seconds: float
    stepping_seconds: float

    @property
    def deviation(self) -> float:
        """Standard deviation of one start's log ratio."""
        return math.sqrt(self.total)

    @property
    def step_factor(self) -> float:
        """How many times the steps per run would tell most in the same time.

        A run costs startup + n steps and has the variance starts + steps / n; the product is
        smallest at n = sqrt(steps startup / (starts stepping)), in units of today's n.
        """
        fixed = self.starts + (self.blocks or 0.0)
        if not self.stepping_seconds or not self.steps:
            return 1.0
        if fixed * self.stepping_seconds == 0:
            return _MOST_TIMES_THE_STEPS
        best = math.sqrt(self.steps * self.startup_seconds / (fixed * self.stepping_seconds))
        return min(max(best, 1 / _MOST_TIMES_THE_STEPS), _MOST_TIMES_THE_STEPS)

    @property
    def gain(self) -> float:
        """How much longer today's number of steps takes to tell as much as `step_factor` times."""
        fixed, factor = self.starts + (self.blocks or 0.0), self.step_factor
        now = (fixed + self.steps) * (self.startup_seconds + self.stepping_seconds)
        then = (fixed + self.steps / factor) * (
            self.startup_seconds + self.stepping_seconds * factor
        )
        return now / then if then > 0 else 1.0

    @property
    def best_blocks_per_start(self) -> int:
        """Blocks in one start of the ranks that tell most in the same time.

        A start costs startup + k blocks and has the variance starts + (blocks + steps) / k.
        """
        within = (self.blocks or 0.0) + self.steps
        cost = self.startup_seconds / max(2 * self.stepping_seconds, 1e-9)
        if self.starts <= 0:
            return MOST_BLOCKS_PER_START
        return min(max(1, round(math.sqrt(cost * within / self.starts))), MOST_BLOCKS_PER_START)


def spread_of(pair: Pair) -> Spread | None:
    """Of the step times of a pair that was run in blocks; None with fewer than three starts."""
    groups: dict[str | int, list[float]] = {}
    timings: list[tuple[RunTiming, RunTiming]] = []
    base, head = pair.base.of(STEP_TIME), pair.head.of(STEP_TIME)
    for block in sorted(set(base) & set(head)):
        start = pair.base.starts.get(block, block)
        groups.setdefault(start, []).append(math.log(head[block] / base[block]))
        if block in pair.base.timing and block in pair.head.timing:
            timings.append((pair.base.timing[block], pair.head.timing[block]))
    if len(groups) < _FEWEST or not timings:
        return None
    samples = list(groups.values())
    total = variance([fmean(values) for values in samples])
    each = fmean(len(values) for values in samples)
    steps = fmean(one.step_error**2 + other.step_error**2 for one, other in timings)
    blocks: float | None = None
    starts = max(0.0, total - steps)
    if each > 1:
        within = fmean(variance(values) for values in samples if len(values) > 1)
        blocks = max(0.0, within - steps)
        starts = max(0.0, total - within / each)
    runs = [one for both in timings for one in both]
    return Spread(
        total,
        starts,
        blocks,
        steps,
        each,
        max(0.0, median(one.wall_seconds - one.stepping_seconds for one in runs)),
        median(one.stepping_seconds for one in runs),
    )


def spread_text(spread: Spread, train_steps: int) -> str:
    """Where the spread comes from, and whether other steps per run would help."""
    parts = [("starts" if spread.blocks is not None else "starts and blocks", spread.starts)]
    parts += [] if spread.blocks is None else [("blocks of one start", spread.blocks)]
    parts.append(("steps", spread.steps))
    whole = sum(size for _, size in parts) or 1.0
    shares = ", ".join(f"{quantity.share(size / whole, 0)} {name}" for name, size in parts)
    wall = spread.startup_seconds + spread.stepping_seconds
    text = (
        f"one start varies by {quantity.share(spread.deviation)}: {shares}; start-up takes "
        f"{spread.startup_seconds:.1f} of {wall:.1f} s of a run"
    )
    if spread.gain >= _WORTH_SAYING:
        better = max(1, round(train_steps * spread.step_factor))
        text += (
            f"; train.steps = {better} instead of {train_steps} would tell as much in "
            f"{quantity.share(1 / spread.gain, 0)} of the time"
        )
    return text
