"""A history as a document: what a terminal, Markdown and the page say is one text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from reports.comparisons.change import less_one, speed_text
from reports.gates.gate_table import interval_text
from reports.history.change_points import ChangePoint, Levels
from reports.history.figure import history_figure
from reports.history.series import Point, Series
from reports.renderers import quantity
from reports.renderers.document import (
    Block,
    Bullets,
    Document,
    Facts,
    Figure,
    Paragraph,
    Section,
    TableBlock,
)
from reports.renderers.table import Row, Table


@dataclass(frozen=True)
class History:
    """One metric. series: each with its levels. problems: lines that were left out."""

    metric: str
    series: tuple[tuple[Series, Levels], ...]
    problems: tuple[str, ...] = ()

    @property
    def changes(self) -> list[tuple[Series, ChangePoint]]:
        """All change points, the newest first."""
        pairs = [(series, change) for series, found in self.series for change in found.changes]
        return sorted(pairs, key=lambda pair: _after(*pair).day, reverse=True)


def document(history: History) -> Document:
    """The whole page: what changed, then a section per series."""
    own = (_section(number, *one) for number, one in enumerate(history.series))
    return Document(
        title=f"mfsdp-bench history: {history.metric}",
        subtitle="",
        sections=(_overview(history), *own),
        footer="Rebuilt from records and files of starts; a start is one launch of all ranks.",
    )


def _overview(history: History) -> Section:
    days = sorted({point.day for series, _ in history.series for point in series.points})
    machines = list(dict.fromkeys(series.machine for series, _ in history.series))
    blocks: list[Block] = [
        Paragraph(_lead(history), tone="lead"),
        Facts(
            (
                ("Cells", str(len(history.series))),
                ("Starts", f"{sum(series.starts for series, _ in history.series):,}"),
                ("Days (UTC)", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"),
                ("Machine", "; ".join(machines)),
            )
        ),
        TableBlock(overview_table(history)),
    ]
    blocks += [Paragraph(text, tone="warning") for text in history.problems]
    return Section("overview", "Where it changed", tuple(blocks))


def _lead(history: History) -> str:
    changes = history.changes
    if not changes:
        silent = sum(bool(levels.remark) for _, levels in history.series)
        text = "No change point"
        if silent:
            text += f"; {silent} of {quantity.counted(len(history.series), 'cell')} cannot tell yet"
        return text + "."
    text = f"{quantity.counted(len(changes), 'change point')}; the newest: "
    return text + f"{changes[0][0].name}, {change_text(*changes[0])}."


def change_text(series: Series, change: ChangePoint) -> str:
    """`regressed between 0123 (2026-03-01) and 4567 (2026-03-02): +6.0 %, ...`."""
    before, after = series.points[change.before], _after(series, change)
    one = change.judgement
    if one.time_ratio is not None:
        moved = (
            f"time, throughput, ratio {speed_text(less_one(one.time_ratio), one.throughput_ratio)}"
        )
    elif series.metric.judge == "count" and one.base is not None and one.head is not None:
        moved = f"{one.head - one.base:+,.0f}"
    else:
        moved = quantity.change(one.change, 2)
    interval = f" ({interval_text(one.interval)} of the metric)" if one.interval else ""
    where = f"between {before.short} ({before.day}) and {after.short} ({after.day})"
    starts = quantity.counted(one.n_head, "start")
    same = "; the code is the same, so the machine changed" if change.same_code else ""
    return f"{one.verdict} {where}: {moved}{interval}, {starts} against {one.n_base}{same}"


def overview_table(history: History) -> Table:
    """One row per series."""
    rows = []
    for series, levels in history.series:
        unit, verdicts = series.metric.unit, [one.judgement.verdict for one in levels.changes]
        texts = (
            series.name,
            _counts(series),
            quantity.amount(series.points[0].value, unit),
            quantity.amount(series.points[-1].value, unit),
            quantity.share(levels.tolerance),
            str(len(verdicts)),
        )
        rows.append(Row(texts, "bad" if verdicts[-1:] == ["regressed"] else "plain"))
    title = history.series[0][0].metric.title
    return _marked(
        f"cell | <history | first {title} | newest {title} | least change | change points", rows
    )


def _counts(series: Series) -> str:
    points = quantity.counted(len(series.points), "point")
    return f"{points}, {quantity.counted(series.starts, 'start')}"


def remarks(series: Series, levels: Levels) -> list[str]:
    """The changes, the newest first, and why others may be unseen."""
    found = [change_text(series, change) for change in reversed(levels.changes)]
    return found + ([levels.remark] if levels.remark else [])


def points_table(series: Series, levels: Levels, newest: int | None = None) -> Table:
    """A row per point, the newest first; `newest`: so many of them."""
    begins = {change.after: change for change in levels.changes}
    rows = []
    for at in reversed(
        range(len(series.points))[-newest:] if newest else range(len(series.points))
    ):
        point, change = series.points[at], begins.get(at)
        low, high = min(point.values), max(point.values)
        unit = series.metric.unit
        spread = f"{quantity.amount(low, unit)} to {quantity.amount(high, unit)}"
        texts = (
            point.day,
            point.short,
            str(len(point.values)),
            quantity.amount(point.value, unit),
            spread if low != high else quantity.MISSING,
            f"{change.judgement.verdict} {quantity.change(change.judgement.change, 2)}"
            if change
            else "",
        )
        bad = change is not None and change.judgement.verdict == "regressed"
        rows.append(Row(texts, "bad" if bad else "plain"))
    return _marked(
        f"day (UTC) | <commit | starts | {series.metric.title} | over starts | <level", rows
    )


def _marked(titles: str, rows: list[Row]) -> Table:
    return replace(Table.of(titles, rows), bad="regressed")


def _section(number: int, series: Series, levels: Levels) -> Section:
    figure = history_figure(f"history-{number}", series, levels)
    caption = (
        f"{series.metric.title} by commit and day, on {series.machine}. A change of level "
        f"is at least {quantity.share(levels.tolerance)}"
    )
    if levels.wobble:
        caption += f"; points of one level spread by {quantity.share(levels.wobble, 2)}"
    blocks: list[Block] = [Figure(f"history-{number}", figure, caption + ".")]
    if said := remarks(series, levels):
        blocks.append(Bullets(tuple(("", text) for text in said)))
    blocks.append(TableBlock(points_table(series, levels)))
    return Section(f"series-{number}", series.name, tuple(blocks))


def to_data(history: History) -> dict[str, Any]:
    """Plain data; changes as fractions, values in the metric's unit."""
    return {
        "metric": history.metric,
        "problems": list(history.problems),
        "series": [
            {
                "cell": series.name,
                "config_hash": series.config,
                "hardware": series.hardware,
                "metric": series.metric.name,
                "unit": series.metric.unit,
                "least_change": levels.tolerance,
                "wobble": levels.wobble,
                "remark": levels.remark,
                "points": [
                    {"day": p.day, "commit": p.commit, "code": p.code, "values": list(p.values)}
                    for p in series.points
                ],
                "change_points": [_change_data(series, one) for one in levels.changes],
            }
            for series, levels in history.series
        ],
    }


def _change_data(series: Series, change: ChangePoint) -> dict[str, Any]:
    one = change.judgement
    return {
        "before": change.before,
        "after": change.after,
        "commit_before": series.points[change.before].commit,
        "commit_after": _after(series, change).commit,
        "day": _after(series, change).day,
        "verdict": one.verdict,
        "change": one.change,
        "interval": None if one.interval is None else [bound - 1 for bound in one.interval],
        "starts_before": one.n_base,
        "starts_after": one.n_head,
        "same_code": change.same_code,
    }


def _after(series: Series, change: ChangePoint) -> Point:
    return series.points[change.after]
