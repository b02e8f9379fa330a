"""Arms that trained in turn within one start: how far apart they are by neighbouring turns.

    base  |100 101|         |131 130|           turn by turn: 103/101, 133/131, ...
    head           |103 103|         |133 134|  the start's ratio is their median

A machine that gets slower meanwhile is slower for both, so neither a drift nor a throttled clock
touches the ratio, and no steady state is asked for. A start stays one sample: all of its turns have
the launches of both arms in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, stdev

from bench.derive.metrics import CPU_TIME, STEP_TIME, THROUGHPUT
from bench.derive.steady import DROPPED_STEPS
from bench.derive.summary import common_steps, step_milliseconds
from bench.record import RunRecord, StepSample
from reports.gates.cell_samples import CellSamples, RunTiming, wall_seconds

_FEWEST_TURNS = 2
_OF_A_MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of a median against that of a mean, for normal noise."""

StepValue = Callable[[Sequence[StepSample]], float | None]
"""Of the samples of all ranks."""


@dataclass(frozen=True)
class TurnedStart:
    """One metric of both arms in one start.

    base, head: as far apart as the median turn is, around the middle of all. error: standard error
    that the turns leave to log(head / base).
    """

    base: float
    head: float
    error: float

    @classmethod
    def of(cls, base: RunRecord, head: RunRecord, value: StepValue) -> TurnedStart | None:
        """None for runs without turns, with too few of them, or without the number."""
        before, after = _by_turn(base, value), _by_turn(head, value)
        both = sorted(set(before) & set(after))
        if len(both) < _FEWEST_TURNS:
            return None
        ratios = [math.log(after[turn] / before[turn]) for turn in both]
        middle = median(math.log(after[turn] * before[turn]) / 2 for turn in both)
        apart = median(ratios)
        error = _OF_A_MEDIAN * stdev(ratios) / math.sqrt(len(ratios))
        return cls(math.exp(middle - apart / 2), math.exp(middle + apart / 2), error)


def by_turns(
    base: CellSamples, head: CellSamples, blocks: Sequence[tuple[RunRecord, RunRecord]]
) -> tuple[CellSamples, CellSamples]:
    """Both sides, with times by turns for those of `blocks` that took turns.

    Args:
        base: of the runs that come first in `blocks`.
        head: of the others.
        blocks: complete ones of one cell.
    """
    for one, other in blocks:
        if not (_has_times(one) and _has_times(other)):
            continue
        time = TurnedStart.of(one, other, _milliseconds)
        if time is None:
            continue
        cpu = TurnedStart.of(one, other, _cpu_milliseconds)
        wall = _wall_of_both(one, other)
        base = _side(base, one, time.base, None if cpu is None else cpu.base, (wall, time.error))
        head = _side(head, other, time.head, None if cpu is None else cpu.head, (wall, time.error))
    return base, head


def _side(
    side: CellSamples,
    record: RunRecord,
    time: float,
    cpu: float | None,
    cost: tuple[float | None, float],
) -> CellSamples:
    """`side` with these numbers of one block. cost: seconds of the run, and `TurnedStart.error`."""
    block, (wall, error) = record.status.repeat, cost
    found = {STEP_TIME.name: time}
    if record.resolved.collective is None:
        found[THROUGHPUT.name] = side.tokens_per_step / (time / 1e3)
    if cpu is not None:
        found[CPU_TIME.name] = cpu
    own = {name: {**side.values.get(name, {}), block: value} for name, value in found.items()}
    timing = dict(side.timing)
    if wall is not None:
        stepping = sum(step_milliseconds(common_steps(record.steps))) / 1e3
        timing[block] = RunTiming(wall, stepping, error / math.sqrt(2))
    return replace(
        side,
        values={**side.values, **own},
        not_steady=side.not_steady - (block not in side.step_milliseconds),
        timing=timing,
        turned=side.turned + 1,
    )


def _by_turn(record: RunRecord, value: StepValue) -> dict[int, float]:
    """Turn -> median over its steps, without the first steps of the run."""
    found: dict[int, list[float]] = {}
    for ranks in common_steps(record.steps)[DROPPED_STEPS:]:
        turn, number = ranks[0].turn, value(ranks)
        if turn is not None and number is not None and 0 < number < math.inf:
            found.setdefault(turn, []).append(number)
    return {turn: median(numbers) for turn, numbers in found.items()}


def _has_times(record: RunRecord) -> bool:
    return record.status.comparable_in_time and not record.status.packed


def _milliseconds(ranks: Sequence[StepSample]) -> float:
    return step_milliseconds([ranks])[0]


def _cpu_milliseconds(ranks: Sequence[StepSample]) -> float | None:
    known = [sample.cpu_milliseconds for sample in ranks]
    if None in known:
        return None
    return sum(sum(one.values()) for one in known if one is not None)


def _wall_of_both(one: RunRecord, other: RunRecord) -> float | None:
    """Half of what the start took, which is the price of each of its runs."""
    walls = [wall_seconds(record) for record in (one, other)]
    return None if None in walls else max(wall for wall in walls if wall is not None) / 2
