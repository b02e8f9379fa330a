"""Judgements as tables: times with their three numbers, everything else with its change."""

from __future__ import annotations

from collections.abc import Sequence

from bench.derive.metrics import STEP_TIME, THROUGHPUT, judged_metrics
from reports.comparisons.change import SPEED, less_one, speed_text
from reports.gates.judgement import Judgement
from reports.renderers import quantity
from reports.renderers.table import Row, RowKind, Table

_TIMES = (
    f"cell | metric | verdict | {SPEED} | interval of the change | tolerance"
    " | p, adjusted | base ms | head ms | <runs"
)
_OTHERS = "cell | metric | verdict | change | tolerance | base | head | <runs"


def time_table(judgements: Sequence[Judgement]) -> Table:
    """Step time and throughput; the interval is of the judged metric's own change."""
    rows = [_time_row(one) for one in judgements if is_speed(one)]
    return Table.of(_TIMES, rows, left=3)


def other_table(judgements: Sequence[Judgement]) -> Table:
    """Everything else, but for counts that are equal, of which there are many."""
    rows = [_other_row(one) for one in judgements if not (is_speed(one) or is_equal_count(one))]
    return Table.of(_OTHERS, rows, left=3)


def is_speed(judgement: Judgement) -> bool:
    """Whether time change, throughput change and ratio are known of it."""
    return judgement.metric in (STEP_TIME.name, THROUGHPUT.name)


def is_count(judgement: Judgement) -> bool:
    """Whether it is of what a step does, which is judged exactly."""
    return judged_metrics()[judgement.metric].judge == "count"


def is_equal_count(judgement: Judgement) -> bool:
    """A count that is the same on both sides."""
    return is_count(judgement) and judgement.verdict == "equivalent"


def verdict_text(judgement: Judgement) -> str:
    """The verdict, and whether it only advises."""
    return judgement.verdict if judgement.required else f"{judgement.verdict} (advisory)"


def metric_text(judgement: Judgement) -> str:
    """The metric, and which one of its kind."""
    return f"{judgement.metric} ({judgement.detail})" if judgement.detail else judgement.metric


def interval_text(interval: tuple[float, float] | None) -> str:
    """An interval of a ratio as changes: `-0.6 % to +1.2 %`."""
    if interval is None:
        return "none"
    return f"{quantity.change(interval[0] - 1)} to {quantity.change(interval[1] - 1)}"


def _time_row(one: Judgement) -> Row:
    sides = (one.base, one.head) if one.metric == STEP_TIME.name else (None, None)
    return Row(
        (
            one.cell,
            one.metric,
            verdict_text(one),
            speed_text(less_one(one.time_ratio), one.throughput_ratio),
            interval_text(one.interval) if one.ratio is not None else quantity.MISSING,
            tolerance_text(one),
            quantity.MISSING if one.p_adjusted is None else f"{one.p_adjusted:.3g}",
            *map(quantity.milliseconds, sides),
            _runs(one),
        ),
        _kind(one),
    )


def _other_row(one: Judgement) -> Row:
    metric = judged_metrics()[one.metric]
    if metric.judge == "curve":
        change = quantity.difference(one.change, signed=True)
        tolerance = quantity.MISSING if one.tolerance is None else f"{one.tolerance:.1e}"
    elif metric.judge == "count" and one.base is not None and one.head is not None:
        more, tolerance = one.head - one.base, "none"
        in_bytes = metric.unit == "bytes" and more
        size = quantity.binary_bytes(abs(more))
        change = f"{'+' if more > 0 else '-'}{size}" if in_bytes else f"{more:+,.0f}"
    else:
        change, tolerance = quantity.change(one.change, 2), tolerance_text(one)
        if one.interval is not None:
            change = f"{change} ({interval_text(one.interval)})"
    texts = (
        one.cell,
        metric_text(one),
        verdict_text(one),
        change,
        tolerance,
        quantity.amount(one.base, metric.unit),
        quantity.amount(one.head, metric.unit),
        _runs(one),
    )
    return Row(texts, _kind(one))


def tolerance_text(one: Judgement) -> str:
    """The tolerance, and whether the noise floor set it."""
    if one.tolerance is None:
        return quantity.MISSING
    return quantity.share(one.tolerance, 1) + (" (noise)" if one.floor else "")


def _runs(one: Judgement) -> str:
    if one.paired:
        return quantity.counted(one.n_head, "block")
    return f"{one.n_head} against {one.n_base}"


def _kind(one: Judgement) -> RowKind:
    if one.verdict in ("regressed", "missed"):
        return "bad"
    return "unsteady" if one.verdict in ("inconclusive", "unmeasured") else "plain"
