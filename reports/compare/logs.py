"""Imported runs next to measured ones and next to each other: what each says, and what it does not.

No verdict is given. A log has no noise floor, no proof of code and often no hardware.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any, Final

from bench.derive.flops import flops_per_global_batch
from bench.derive.hardware import UNKNOWN, hardware_key
from bench.derive.metrics import ALLOCATOR_PEAK, LOSS, MEMORY, STEP_TIME, TFLOPS, THROUGHPUT
from bench.spec import ModelShape
from bench.workload import ImportedRun, ImportedStep, Workload
from reports.compare.change import threshold
from reports.compare.series import Gap, absolute, stated_steps
from reports.compare.unlike import (
    NumberChange,
    Pace,
    Unlike,
    comparable_rates,
    is_of_work,
    norm_without_loss,
    rate_without_time,
    trade_off,
    unlike_paces,
)
from reports.renderers import quantity
from reports.renderers.table import Table
from reports.views.cells import Cell

ABSENT = "absent"
_COLD = 2
CAPTION = (
    "Imported runs say what their logs say; absent is what they do not say. Their times are the "
    "median of all steps that have one, without the first two of Megatron-LM, whose second line is "
    "a mean over both. There is no verdict between an imported and a measured run."
)


@dataclass(frozen=True)
class Shown:
    """One run of either kind; None is absent. origin: `measured`, or importer and log.

    run: what was imported, None for a measured cell. pace: what it is compared by.
    """

    name: str
    origin: str
    workload: Workload
    pace: Pace
    steps: int
    loss: float | None
    peak_bytes: float | None = None
    run: ImportedRun | None = None


def counted(run: ImportedRun) -> tuple[ImportedStep, ...]:
    """Steps whose times stand.

    Megatron-LM prints iteration 1 and resets nothing: the line of iteration 2 is a mean over both.
    """
    megatron = run.workload.framework.startswith("megatron")
    later = tuple(step for step in run.steps if step.step > _COLD and step.milliseconds is not None)
    begins = {step.step for step in run.steps if step.milliseconds is not None} >= {1, 2}
    return later if megatron and begins and later else run.steps


def of_import(run: ImportedRun) -> Shown:
    """The numbers of a log; tokens/s only where it tells tokens and times, or a rate and ranks."""
    steps = counted(run)
    times = stated_steps(steps, "milliseconds").values()
    losses = [*stated_steps(run.steps, "loss").values()]
    usual = run.workload.tokens_per_step
    of_device = stated_steps(steps, "tokens_per_second_per_device").values()
    rates = [
        tokens / step.milliseconds * 1e3
        for step in steps
        if step.milliseconds and (tokens := step.tokens or usual) is not None
    ] or [
        *stated_steps(steps, "tokens_per_second").values(),
        *(rate * run.workload.ranks for rate in of_device if run.workload.ranks),
    ]
    origin = run.provenance
    time, rate = (median(values) if values else None for values in (times, rates))
    flops = stated_steps(steps, "teraflops_per_device").values()
    counted_tokens = {step.step: step.tokens for step in run.steps if step.tokens}
    return Shown(
        run.id,
        f"{origin.importer or 'no steps'}: {origin.source or 'unknown log'}",
        run.workload,
        Pace(run.workload, time, rate, median(flops) if flops else None, counted_tokens),
        len(run.steps),
        losses[-1] if losses else None,
        max((step.device_peak_bytes for step in run.steps if step.device_peak_bytes), default=None),
        run,
    )


def of_cell(cell: Cell) -> Shown:
    """The medians of a measured cell."""
    record = cell.runs[0].record
    device = hardware_key(record).device
    named = {"device": None if device == UNKNOWN else device}
    time, rate, flops = (cell.value(metric) for metric in (STEP_TIME, THROUGHPUT, TFLOPS))
    return Shown(
        cell.name,
        "measured",
        record.workload,
        Pace(record.workload.model_copy(update=named), time, rate, flops),
        record.resolved.train.steps,
        cell.value(LOSS),
        cell.value(ALLOCATOR_PEAK),
    )


def side_by_side(shown: Iterable[Shown]) -> Table:
    """One row per run."""
    return Table.of(
        "run | from | engine | model | device | ranks | batch | sequence | ms per step | tokens/s"
        " | allocated peak | loss",
        map(_row, shown),
        left=5,
    )


def absences(shown: Iterable[Shown]) -> list[tuple[str, str]]:
    """(runs, what their importer looked for and did not find)."""
    names: dict[str, list[str]] = {}
    for run in shown:
        if run.run is not None and run.run.provenance.absent:
            names.setdefault(", ".join(run.run.provenance.absent), []).append(run.name)
    return [(", ".join(own), missing) for missing, own in names.items()]


def to_data(shown: Sequence[Shown]) -> list[dict[str, object]]:
    """As plain JSON data; null is absent."""
    return [
        {
            "name": run.name,
            "origin": run.origin,
            "workload": run.workload.model_dump(mode="json"),
            "steps": run.steps,
            "step_milliseconds_median": run.pace.milliseconds,
            "tokens_per_second": run.pace.tokens_per_second,
            "final_loss": run.loss,
            "device_peak_bytes": run.peak_bytes,
            "absent": list(run.run.provenance.absent) if run.run else [],
        }
        | ({} if run.run is None else _said(run.run))
        for run in shown
    ]


def _said(run: ImportedRun) -> dict[str, object]:
    origin = run.provenance
    return {
        "label": origin.label,
        "stated": list(origin.stated),
        "lines": origin.lines,
        "remarks": list(origin.remarks),
        "nccl_lines": len(run.nccl),
        "last_step": asdict(run.steps[-1]) if run.steps else None,
    }


def _row(run: Shown) -> tuple[str, ...]:
    work, pace = run.workload, run.pace
    words = (work.engine or work.framework, work.model, work.device)
    numbers: tuple[tuple[float | None, Callable[[float], str]], ...] = (
        *(
            (count, "{:,}".format)
            for count in (work.ranks, work.global_batch or work.batch, work.seq_len)
        ),
        *((number, quantity.significant) for number in (pace.milliseconds, pace.tokens_per_second)),
        (run.peak_bytes, quantity.binary_bytes),
        (run.loss, quantity.loss),
    )
    texts = (ABSENT if number is None else text(number) for number, text in numbers)
    return (run.name, run.origin, *(word or ABSENT for word in words), *texts)


STEPS_CAPTION = (
    "Each side is one run. Its steps are no repetitions of it, so there is no verdict on time and "
    "no interval. Losses are compared step by step, where both logs tell one."
)


_DIFFERENCES = {"loss": "loss", "gradient norm": "grad_norm"}
_CHANGES = (
    ("step time, median", "ms", "milliseconds"),
    ("tokens/s per device, median", "", "tokens_per_second_per_device"),
    ("tokens/s, median", "", "tokens_per_second"),
    ("TFLOP/s per device, median", "", "teraflops_per_device"),
    ("allocated peak of a device", "bytes", "device_peak_bytes"),
    ("reserved peak of a device", "bytes", "device_reserved_peak_bytes"),
    ("allocated memory of a device", "bytes", "device_allocated_bytes"),
    ("reserved memory of a device", "bytes", "device_reserved_bytes"),
    ("memory of a device, kind not said", "bytes", "device_memory_bytes"),
)


def step_differences(base: ImportedRun, head: ImportedRun) -> dict[str, Gap]:
    """Head minus base, of each quantity that both logs tell at some step."""
    both = {
        name: Gap.of(stated_steps(base.steps, key), stated_steps(head.steps, key), absolute)
        for name, key in _DIFFERENCES.items()
    }
    return {name: gap for name, gap in both.items() if gap}


def step_changes(base: ImportedRun, head: ImportedRun) -> list[NumberChange]:
    """Medians and peaks that both logs tell."""
    changes = []
    for name, unit, of_step in _CHANGES:
        peak = unit == "bytes"
        before, after = (
            [*stated_steps(run.steps if peak else counted(run), of_step).values()]
            for run in (base, head)
        )
        if before and after:
            of_all = max if peak else median
            changes.append(NumberChange(name, unit, float(of_all(before)), float(of_all(after))))
    return changes


def differences_table(gaps: Mapping[str, Gap]) -> Table:
    """One row per quantity."""
    rows = (
        (
            name,
            f"{len(gap.apart):,}",
            gap.text(gap.at, quantity.difference(gap.largest, signed=True)),
            f"{gap.at:,}",
            gap.text(last, quantity.difference(gap.apart[last], signed=True)) + f" (step {last:,})",
        )
        for name, gap in gaps.items()
        for last in (max(gap.apart),)
    )
    return Table.of(" | steps in both | largest difference | at step | at the last", rows)


def changes_table(numbers: Iterable[NumberChange]) -> Table:
    """One row per number."""
    rows = (
        (n.name, _amount(n, n.base), _amount(n, n.head), quantity.ratio(n.ratio)) for n in numbers
    )
    return Table.of(" | base | head | head / base", rows)


@dataclass(frozen=True)
class Beside:
    """Two runs, compared as far as they are alike.

    changes: numbers of both; where they are `unlike`, the rates that compare all the same.
    differences: step by step, where both compute the same. doubts: in words.
    """

    base: str
    head: str
    unlike: tuple[Unlike, ...]
    changes: tuple[NumberChange, ...]
    differences: Mapping[str, Gap] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()

    @property
    def divergences(self) -> list[str]:
        """Quantities that are NaN or infinite on one side alone, and from which step on."""
        gaps = self.differences.items()
        texts = [f"{name} {gap.divergence}" for name, gap in gaps if gap.divergence]
        return [f"{self.head} diverges from {self.base}: {text}" for text in texts]

    def to_data(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "not_comparable": [vars(difference) for difference in self.unlike],
            "differences": [
                {
                    "name": name,
                    "steps": len(gap.apart),
                    "largest": gap.largest,
                    "at": gap.at,
                    "last": gap.apart[last],
                    "last_step": last,
                }
                | ({"divergence": gap.divergence} if gap.divergence else {})
                for name, gap in self.differences.items()
                for last in (max(gap.apart),)
            ],
            "changes": [vars(change) | {"ratio": change.ratio} for change in self.changes],
            "doubts": list(self.doubts),
        }


def beside(base: Shown, head: Shown) -> Beside:
    """Both kinds of runs; step by step only two logs."""
    differing = unlike_paces(base.pace, head.pace)
    rates = tuple(comparable_rates(differing, base.pace, head.pace)) if differing else ()
    if base.run is None or head.run is None:
        return Beside(base.name, head.name, differing, rates)
    two = base.run, head.run
    changes = rates if differing else tuple(step_changes(*two))
    if any(map(is_of_work, differing)):
        return Beside(base.name, head.name, differing, changes)
    return Beside(
        base.name, head.name, differing, changes, step_differences(*two), _doubts(changes, *two)
    )


def _doubts(
    changes: Sequence[NumberChange], base: ImportedRun, head: ImportedRun
) -> tuple[str, ...]:
    ratios = {change.name.removesuffix(", median"): change.ratio for change in changes}
    rates = {name: ratio for name, ratio in ratios.items() if "/s" in name}
    losses, norms = (
        (stated_steps(base.steps, name), stated_steps(head.steps, name))
        for name in _DIFFERENCES.values()
    )
    devices = base.workload.ranks if base.workload.ranks == head.workload.ranks else None
    norm = norm_without_loss(losses, norms, devices)
    rate = ratios.get("tokens/s per device")
    time = ratios.get("step time") or (1 / rate if rate else None)
    peaks = (ratios.get(f"{held} peak of a device") for held in ("allocated", "reserved"))
    traded = trade_off(time, next(filter(None, peaks), None))
    texts = (*rate_without_time(ratios.get("step time"), rates), norm, traded)
    return tuple(filter(None, texts))


def _amount(change: NumberChange, value: float) -> str:
    if change.unit == "bytes":
        return quantity.binary_bytes(value)
    return f"{quantity.significant(value)} {change.unit}".rstrip()


_NAMES: Final[Mapping[str, str]] = {"milliseconds": "step time", "grad_norm": "gradient norm"}
_NOT_VALUES: Final = ("step", "extra", "lines", "learning_rate")
_DIGITS: Final = 6


@dataclass(frozen=True)
class Refreshed:
    """One metric of two imported runs. tolerance: of changes that pass unflagged.

    stored: how many steps one side has at least, compared or not.
    """

    name: str
    gap: Gap
    tolerance: float
    stored: int

    @property
    def flag(self) -> str:
        """What a reviewer is to look at."""
        if self.gap.first() is None:
            return "equal"
        if self.gap.divergence:
            return "diverges"
        moved = self.gap.middle if self.tolerance else self.gap.largest
        return "review" if abs(moved) > self.tolerance else "within tolerance"

    def to_data(self) -> dict[str, Any]:
        """As plain JSON data; changes are fractions."""
        gap = self.gap
        numbers = {
            "steps": len(gap.apart),
            "stored": self.stored,
            "first": gap.first(),
            "largest": gap.largest,
        }
        about = {"at": gap.at, "middle": gap.middle, "tolerance": self.tolerance, "flag": self.flag}
        divergence = {"divergence": gap.divergence} if gap.divergence else {}
        return {"name": self.name} | numbers | about | divergence


def refreshed(base: ImportedRun, head: ImportedRun) -> list[Refreshed]:
    """Every metric that both have at some step, under the names of its source."""
    before, after = _series(base), _series(head)
    cold = {s.step for s in (*base.steps, *head.steps)} - {s.step for s in counted(base)}
    cold |= {s.step for s in head.steps} - {s.step for s in counted(head)}
    metrics = []
    for name in (name for name in before if name in after):
        left_out = cold if name == "milliseconds" else ()
        kept = {step: value for step, value in before[name].items() if step not in left_out}
        if gap := Gap.of(kept, after[name]):
            stored = len(before[name].keys() | after[name].keys())
            shown = _NAMES.get(name, name.replace("_", " "))
            metrics.append(Refreshed(shown, gap, _tolerance(name), stored))
    return metrics


REFRESH_CAPTION = (
    "Changes are relative to the base, at steps that both have, of all steps that either has. Not"
    " compared are a step of one side, and a time of Megatron-LM's steps 1 and 2, which warm up."
    " Review: a time, rate or memory whose median moved more than"
    f" {quantity.share(threshold(STEP_TIME))} or {quantity.share(threshold(MEMORY))}, any other"
    " number that moved at all."
)


def refresh_table(metrics: Iterable[Refreshed]) -> Table:
    """One row per metric; differences in per cent."""
    rows = (
        (
            metric.name,
            f"{len(metric.gap.apart):,} of {metric.stored:,}",
            "-" if (first := metric.gap.first()) is None else f"{first:,}",
            metric.gap.text(metric.gap.at, quantity.change(metric.gap.largest, _DIGITS)),
            f"{metric.gap.at:,}",
            quantity.change(metric.gap.middle, _DIGITS),
            metric.flag,
        )
        for metric in metrics
    )
    titles = (
        "metric | steps compared | first different | largest change | at step | median change"
        " | <flag"
    )
    return Table.of(titles, rows)


def _series(run: ImportedRun) -> dict[str, dict[int, float]]:
    series: dict[str, dict[int, float]] = {}
    for step in run.steps:
        own = {known.name: getattr(step, known.name) for known in fields(ImportedStep)}
        told = {name: value for name, value in own.items() if name not in _NOT_VALUES}
        told |= {name: value for name, value in step.extra.items() if isinstance(value, float)}
        for name, value in told.items():
            if value is not None:
                series.setdefault(name, {})[step.step] = float(value)
    return series


def _tolerance(name: str) -> float:
    if name == "milliseconds" or "per_second" in name or "per_device" in name:
        return threshold(STEP_TIME)
    return threshold(MEMORY) if name.endswith("_bytes") else 0.0


_NEAR = 0.02
_LENGTHS = tuple(2**power for power in range(8, 18))
_MOST_DEVICES = 2**14
_SIZE = re.compile(r"llama.*?(\d+(?:\.\d+)?)\s?b\b", re.IGNORECASE)
_PRESET = re.compile(r"(?:llama\d?-)?(\d+(?:\.\d+)?)b")


def flops_doubt(run: Shown, shapes: Mapping[str, ModelShape]) -> str:
    """That what is stated contradicts the rate, or the length and devices that it implies.

    "" where nothing is known: no named model, batch, time or rate, or no single solution.
    """
    work, time, rate = run.workload, run.pace.milliseconds, run.pace.teraflops_per_device
    shape = _named(work.model, shapes)
    if shape is None or not time or not rate or not work.global_batch:
        return ""
    done = rate * 1e12 * time / 1e3
    exact = {
        length: flops_per_global_batch(shape, length, work.global_batch) / done
        for length in ({work.seq_len} if work.seq_len else _LENGTHS)
        if length
    }
    solutions = list(_solutions(exact, work.ranks))
    stated = f"{work.model}, global batch {work.global_batch:,}, {rate:g} TFLOP/s per device"
    if work.seq_len and work.ranks and not solutions:
        times = quantity.ratio(exact[work.seq_len] / work.ranks)
        return (
            f"{run.name} contradicts the FLOP formula: sequence length {work.seq_len:,} on"
            f" {quantity.counted(work.ranks, 'device')} would be {times} its rate ({stated})"
        )
    if len(solutions) != 1 or (work.seq_len and work.ranks):
        return ""
    length, devices = solutions[0]
    return (
        f"{run.name}: the FLOP formula gives sequence length {length:,} on"
        f" {quantity.counted(devices, 'device')} ({stated})"
    )


def _solutions(exact: Mapping[int, float], ranks: int | None) -> Iterator[tuple[int, int]]:
    """Lengths, and the devices stated or a power of two, that are within 2 % of the rate."""
    for length, devices in exact.items():
        near = ranks or 1 << max(round(devices * 2**0.5).bit_length() - 1, 0)
        if near <= _MOST_DEVICES and abs(devices / near - 1) <= _NEAR:
            yield length, near


def _named(model: str | None, shapes: Mapping[str, ModelShape]) -> ModelShape | None:
    """The preset that a text names, by its own name or as a Llama of its size."""
    if model is None:
        return None
    size = _SIZE.search(model.replace("_", " "))
    for name, shape in shapes.items():
        own = _PRESET.fullmatch(name)
        if model == name or (size and own and size[1] == own[1]):
            return shape
    return None
