"""Judgements as tables: times with their three numbers, everything else with its change."""

from __future__ import annotations

from collections.abc import Sequence

from reports.gates.judgement import Judgement
from reports.gates.policy import TIME_METRICS
from reports.renderers import quantity
from reports.renderers.table import Column, Row, RowKind, Table

_TIMES = (
    Column("cell", "left"),
    Column("metric", "left"),
    Column("verdict", "left"),
    Column("time change"),
    Column("throughput change"),
    Column("throughput ratio"),
    Column("interval of the change"),
    Column("tolerance"),
    Column("p, adjusted"),
    Column("base ms"),
    Column("head ms"),
    Column("runs", "left"),
)
_OTHERS = (
    Column("cell", "left"),
    Column("metric", "left"),
    Column("verdict", "left"),
    Column("change"),
    Column("tolerance"),
    Column("base"),
    Column("head"),
    Column("runs", "left"),
)


def time_table(judgements: Sequence[Judgement]) -> Table:
    """Time metrics; the interval is of the judged metric's own change."""
    rows = [_time_row(one) for one in judgements if one.metric in TIME_METRICS]
    return Table(_TIMES, tuple(rows))


def other_table(judgements: Sequence[Judgement]) -> Table:
    """Memory, bytes sent and loss."""
    rows = [_other_row(one) for one in judgements if one.metric not in TIME_METRICS]
    return Table(_OTHERS, tuple(rows))


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
    scale = one.metric == "step_time"
    return Row(
        (
            one.cell,
            one.metric,
            verdict_text(one),
            quantity.change(_less_one(one.time_ratio)),
            quantity.change(_less_one(one.throughput_ratio)),
            quantity.ratio(one.throughput_ratio),
            interval_text(one.interval) if one.ratio is not None else quantity.MISSING,
            tolerance_text(one),
            quantity.MISSING if one.p_adjusted is None else f"{one.p_adjusted:.3g}",
            _milliseconds(one.base, step_time=scale),
            _milliseconds(one.head, step_time=scale),
            _runs(one),
        ),
        _kind(one),
    )


def _other_row(one: Judgement) -> Row:
    amount = quantity.binary_bytes if one.metric in ("memory", "wire_bytes") else quantity.loss
    if one.metric == "loss":
        change = quantity.signed_difference(one.change)
        tolerance = quantity.MISSING if one.tolerance is None else f"{one.tolerance:.1e}"
    else:
        change, tolerance = quantity.change(one.change, 2), tolerance_text(one)
    texts = (
        one.cell,
        metric_text(one),
        verdict_text(one),
        change,
        tolerance,
        amount(one.base),
        amount(one.head),
        _runs(one),
    )
    return Row(texts, _kind(one))


def tolerance_text(one: Judgement) -> str:
    """The tolerance, and whether the noise floor set it."""
    if one.tolerance is None:
        return quantity.MISSING
    return quantity.share(one.tolerance, 1) + (" (noise)" if one.floor else "")


def _milliseconds(value: float | None, *, step_time: bool) -> str:
    if value is None:
        return quantity.MISSING
    return f"{value:.1f}" if step_time else "-"


def _less_one(ratio: float | None) -> float | None:
    return None if ratio is None else ratio - 1


def _runs(one: Judgement) -> str:
    if one.paired:
        return quantity.counted(one.n_head, "block")
    return f"{one.n_head} against {one.n_base}"


def _kind(one: Judgement) -> RowKind:
    if one.verdict == "regressed":
        return "bad"
    return "unsteady" if one.verdict in ("inconclusive", "unmeasured") else "plain"
