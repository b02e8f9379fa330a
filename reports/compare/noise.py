"""A/A calibration: how far identical code appears to be from itself on one kind of hardware.

The noise floor of a cell is the largest change that its A/A comparison could not exclude: the end
of the 95 % interval that is farther from no change. A gate's tolerance is never smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from bench.derive.hardware import HardwareKey
from bench.derive.metrics import CPU_TIME, STEP_TIME, THROUGHPUT, Metric
from bench.errors import NothingMeasuredError, UsageError, first_problem
from bench.store import ResultsStore
from reports.compare.sides import Pair
from reports.compare.statistics import estimate, smallest_deciding_n
from reports.renderers import quantity

NOISE_VERSION = 1
ALPHA = 0.05

_CALIBRATED = {STEP_TIME: "step time", CPU_TIME: "CPU time"}
FEWEST_BLOCKS = smallest_deciding_n(ALPHA, paired=True)


def _checked_time(text: str) -> str:
    datetime.fromisoformat(text)
    return text


_Relative = Annotated[float, Field(gt=-1, lt=10)]


@dataclass(frozen=True)
class CellNoise:
    """A/A of one cell; everything relative (0.01 is 1 %).

    change: apparent change of `metric`. low, high: its 95 % interval.
    """

    cell: str
    config_hash: str
    blocks: int
    change: _Relative
    low: _Relative
    high: _Relative
    metric: str = STEP_TIME.name

    @property
    def floor(self) -> float:
        """The largest change, up or down, that identical code could not exclude."""
        return max(self.high, 1 / (1 + self.low) - 1, 0.0)


@dataclass(frozen=True)
class NoiseCalibration:
    """What is stored per hardware key."""

    hardware: HardwareKey
    measured_utc: Annotated[str, AfterValidator(_checked_time)]
    sweep: str
    commit: str
    cells: Annotated[tuple[CellNoise, ...], Field(min_length=1)]

    def floor(self, config_hash: str, metric: Metric = STEP_TIME) -> float:
        """The floor of this configuration, or the largest one if it was not calibrated.

        0 for a metric that was not; throughput has that of step time.
        """
        name = STEP_TIME.name if metric is THROUGHPUT else metric.name
        known = [cell for cell in self.cells if cell.metric == name]
        own = [cell.floor for cell in known if cell.config_hash == config_hash]
        return max(own or [cell.floor for cell in known], default=0.0)

    def describe(self) -> str:
        """In words: the floors and their day."""
        ranges = [
            f"{quantity.share(min(floors))} to {quantity.share(max(floors))} of {title}"
            for title, floors in self._floors()
        ]
        cells = quantity.counted(len({cell.cell for cell in self.cells}), "cell")
        return f"noise floor {', '.join(ranges)}, calibrated {self.measured_utc[:10]} ({cells})"

    def _floors(self) -> list[tuple[str, list[float]]]:
        """Floors by metric, in words; a metric that was not calibrated is left out."""
        by_metric = []
        for metric, title in _CALIBRATED.items():
            floors = [cell.floor for cell in self.cells if cell.metric == metric.name]
            by_metric += [(title, floors)] if floors else []
        return by_metric

    def to_document(self) -> dict[str, Any]:
        """Plain data for noise/<hardware-key>.json."""
        return {
            "noise_version": NOISE_VERSION,
            "hardware_key": self.hardware.slug,
            "hardware": asdict(self.hardware),
            "measured_utc": self.measured_utc,
            "sweep": self.sweep,
            "commit": self.commit,
            "floor": max(floor for _, floors in self._floors()[:1] for floor in floors),
            "cells": [asdict(cell) | {"floor": cell.floor} for cell in self.cells],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> NoiseCalibration:
        """Read it back.

        Raises:
            UsageError: damaged, or of another version.
        """
        version = document.get("noise_version")
        if version != NOISE_VERSION:
            raise UsageError(
                f"noise calibration: expected version {NOISE_VERSION}, found {version!r}; "
                "calibrate again with `mfsdp-bench baseline noise`"
            )
        try:
            return TypeAdapter(cls).validate_python(document)
        except ValidationError as error:
            raise UsageError(
                f"the noise calibration is damaged ({first_problem(error)}); calibrate again with "
                "`mfsdp-bench baseline noise`"
            ) from error


def calibrate(pairs: Sequence[Pair], *, sweep: str, measured_utc: str) -> NoiseCalibration:
    """Make a calibration of A/A pairs: the same code on both sides, interleaved.

    Raises:
        UsageError: the sides differ in code or configuration, so this is no A/A.
        NothingMeasuredError: no cell has enough blocks with a steady time.
    """
    cells, short = [], []
    for pair in pairs:
        base, head = pair.base, pair.head
        if (base.code, base.config_hash) != (head.code, head.config_hash):
            raise UsageError(f"{base.name}: the two sides are not the same code and configuration")
        known = [noise for metric in _CALIBRATED if (noise := _calibrated(pair, metric))]
        if len(pair.of(STEP_TIME)[0]) < FEWEST_BLOCKS:
            short.append(f"{base.name} has {len(pair.of(STEP_TIME)[0])}")
        else:
            cells += known
    if not cells:
        what = "; ".join(short) or "no cell was measured"
        raise NothingMeasuredError(
            f"no noise floor: at least {FEWEST_BLOCKS} blocks with steady times are needed ({what})"
        )
    first = pairs[0].base
    return NoiseCalibration(first.hardware, measured_utc, sweep, first.commit, tuple(cells))


def _calibrated(pair: Pair, metric: Metric) -> CellNoise | None:
    """None where too few blocks have the metric."""
    values, cell = pair.of(metric), pair.base
    if len(values[0]) < FEWEST_BLOCKS:
        return None
    ratio = estimate(*values, ALPHA, paired=True)
    if ratio.interval is None:
        raise ValueError(f"{ratio.n} blocks give no interval")
    low, high = (math.exp(end) - 1 for end in ratio.interval)
    change = ratio.ratio - 1
    return CellNoise(cell.name, cell.config_hash, ratio.n, change, low, high, metric.name)


def calibrations(store: ResultsStore) -> Callable[[HardwareKey], NoiseCalibration | None]:
    """Finds the noise calibration of a kind of hardware; reads each file once."""

    @cache
    def find(key: HardwareKey) -> NoiseCalibration | None:
        document = store.noise.find(key.slug)
        return None if document is None else NoiseCalibration.from_document(document)

    return find
