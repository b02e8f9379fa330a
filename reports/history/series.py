"""Starts as series of points: one per cell and kind of hardware. Pure.

starts ── config, hardware ──> series ── code, day ──> points ──> change points
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from bench.derive.metrics import Metric
from reports.history.starts import Start, each_once

_COMMIT = 12


@dataclass(frozen=True)
class Point:
    """Starts of one code on one day, at least one. values: the metric, a number per start."""

    commit: str
    code: str
    day: str
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        """Median over starts: a start is the unit, not a step."""
        return median(self.values)

    @property
    def short(self) -> str:
        """The commit, short, with a plus for local changes."""
        return self.commit.replace(" (with local changes)", "+")[: _COMMIT + 1]


@dataclass(frozen=True)
class Series:
    """Points of one cell in the order of their first start.

    metric: what was found; of alternatives, the first that all starts have. loss_bound: the widest
    of the starts.
    """

    name: str
    config: str
    hardware: str
    machine: str
    metric: Metric
    points: tuple[Point, ...]
    loss_bound: float | None = None

    @property
    def starts(self) -> int:
        """Over all points."""
        return sum(len(point.values) for point in self.points)


def series_of(starts: Sequence[Start], metric: Metric) -> list[Series]:
    """Of all starts that have the metric; a start that stands twice counts once."""
    grouped: dict[tuple[str, str], list[Start]] = {}
    for start in each_once(starts):
        grouped.setdefault((start.config, start.hardware), []).append(start)
    found = []
    for members in grouped.values():
        known = (m for m in metric.alternatives if all(m.name in one.values for one in members))
        own = next(known, metric)
        having = [start for start in members if own.name in start.values]
        if having:
            found.append(_series(having, own))
    names = [one.name for one in found]
    return [
        one if names.count(one.name) == 1 else replace(one, name=f"{one.name} ({one.config[:6]})")
        for one in found
    ]


def _series(starts: Sequence[Start], metric: Metric) -> Series:
    grouped: dict[tuple[str, str], list[Start]] = {}
    for start in starts:
        grouped.setdefault((start.code or start.commit, start.day), []).append(start)
    points = tuple(
        Point(
            commit=members[-1].commit,
            code=members[-1].code,
            day=members[-1].day,
            values=tuple(start.values[metric.name] for start in members),
        )
        for members in grouped.values()
    )
    newest = starts[-1]
    bounds = [start.loss_bound for start in starts if start.loss_bound is not None]
    return Series(
        name=newest.cell,
        config=newest.config,
        hardware=newest.hardware,
        machine=newest.machine,
        metric=metric,
        points=points,
        loss_bound=max(bounds, default=None),
    )
