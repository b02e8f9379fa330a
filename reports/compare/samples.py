"""What a gate needs of one cell of one side, from records or from a baseline. Plain data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median

from bench.derive.counts import StepCounts, step_counts
from bench.derive.hardware import STATED, UNKNOWN, HardwareKey, hardware_key, nodes_of
from bench.derive.live_storage import LiveStorage, live_storage
from bench.derive.metrics import (
    ALLOCATOR_PEAK,
    CURVES,
    LEDGER_PEAK,
    MEMORY_NOT_SAID,
    RESERVED_PEAK,
    STEP_TIME,
    THROUGHPUT,
    Metric,
    judged_metrics,
)
from bench.record import SCHEMA_VERSION
from bench.workload import ImportedRun, Workload
from reports.compare.logs import of_import
from reports.compare.parity import EXACT_BOUNDS, UNIT_ROUNDOFF, losses, tolerance_of
from reports.compare.series import Curve, stated_steps
from reports.compare.unlike import Pace, only_compared
from reports.views.cells import Cell, Run
from reports.views.machine import entries

TOKENS = "tokens"
_STATED = HardwareKey(STATED, UNKNOWN, 1)


@dataclass(frozen=True)
class CellSamples:
    """Runs of one configuration, one code, one kind of hardware.

    values: metric -> block -> number, of finished runs that have it (a time only of those whose
    time counts). curves: metric -> one of each finished run; empty where there is none; `TOKENS`
    of a step, as a log counts them.
    loss_bound: relative difference of losses that the dtypes explain. not_steady: finished runs
    without a time; why_not_steady: reasons of those, each once. counts: what a step of one of the
    runs did, None if none counted. live: what one of the runs held between two steps. nodes: of a
    cluster, of all runs. inputs: as of a status, of one run. tokens_per_step, workload: None if a
    file does not say.
    ledger_is_measured: whether the peak of the ledger is of one moment, and no bound; None where
    an older baseline does not say.
    """

    name: str
    slug: str = ""
    config_hash: str = ""
    schema_version: int = SCHEMA_VERSION
    hardware: HardwareKey = _STATED
    code: str = ""
    commit: str = ""
    tokens_per_step: float | None = None
    values: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    curves: Mapping[str, tuple[Curve, ...]] = field(default_factory=dict)
    loss_bound: float = 0.0
    not_steady: int = 0
    why_not_steady: tuple[str, ...] = ()
    counts: StepCounts | None = None
    live: LiveStorage | None = None
    nodes: frozenset[str] = frozenset()
    inputs: Mapping[str, str] = field(default_factory=dict)
    workload: Workload | None = None
    ledger_is_measured: bool | None = None

    def of(self, metric: Metric) -> Mapping[int, float]:
        """The metric's numbers by block."""
        return self.values.get(metric.name, {})

    def curve(self, name: str) -> Mapping[int, float]:
        """Losses or norms of the first run by step; empty where there is none."""
        runs = self.curves.get(name, ())
        return runs[0].by_step if runs else {}

    @property
    def is_timed(self) -> bool:
        """Whether it has step times, though none may be steady; a log may state none."""
        unsteady = self.not_steady and self.hardware.kind != STATED
        return bool(self.of(STEP_TIME) or unsteady)

    @property
    def pace(self) -> Pace:
        """Medians over runs, on the device of the hardware; without a workload only the time."""
        time, rate = (
            median(values.values()) if (values := self.of(metric)) else None
            for metric in (STEP_TIME, THROUGHPUT)
        )
        tokens = {step: round(count) for step, count in self.curve(TOKENS).items()}
        device = None if self.hardware.device == UNKNOWN else self.hardware.device
        work = (self.workload or Workload(framework="unknown")).model_copy(
            update={"device": device}
        )
        return Pace(work, time, rate, tokens=tokens)


def cell_samples(cell: Cell) -> CellSamples:
    """Samples of the finished runs of `cell`.

    Raises:
        ValueError: no finished run.
    """
    counted = cell.finished
    if not counted:
        raise ValueError(f"{cell.name} has no finished run")
    record = counted[0].record
    windows = [run.summary.steady for run in counted]
    values = {
        name: numbers
        for name, metric in judged_metrics().items()
        if not metric.alternatives and (numbers := _by_block(counted, metric))
    }
    return CellSamples(
        name=cell.name,
        slug=record.resolved.slug,
        config_hash=record.resolved.config_hash,
        schema_version=record.status.schema_version,
        hardware=hardware_key(record),
        code=record.status.code,
        inputs=record.status.inputs,
        ledger_is_measured=cell.ledger_is_measured,
        commit=str(entries(record.environment, "git").get("commit") or ""),
        tokens_per_step=float(record.resolved.tokens_per_step),
        values=values,
        curves={
            name: tuple(Curve.of(losses(run.record, name)) for run in counted) for name in CURVES
        },
        loss_bound=tolerance_of(record).bound,
        not_steady=len(counted) - len(values.get(STEP_TIME.name, ())),
        why_not_steady=tuple(dict.fromkeys(w.reason for w in windows if w and not w.stable)),
        counts=next((c for run in counted if (c := step_counts(run.record))), None),
        live=next((live for run in counted if (live := live_storage(run.record))), None),
        nodes=frozenset().union(*(nodes_of(run.record) for run in counted)),
        workload=record.workload,
    )


def imported_samples(run: ImportedRun) -> CellSamples:
    """The one run of a log or of a file of another project, as far as it tells.

    Its configuration is what it states; losses may differ by what BF16 explains if it names no
    dtype.
    """
    shown, work = of_import(run), run.workload
    config = only_compared(work).model_dump_json(exclude_none=True)
    numbers = {
        STEP_TIME.name: shown.pace.milliseconds,
        THROUGHPUT.name: shown.pace.tokens_per_second,
        ALLOCATOR_PEAK.name: shown.peak_bytes,
        RESERVED_PEAK.name: _largest(run, "device_reserved_peak_bytes"),
        MEMORY_NOT_SAID.name: _largest(run, "device_memory_bytes"),
    }
    dtype = (work.compute_dtype or "bf16").removeprefix("torch.")
    return CellSamples(
        name=run.id,
        slug=run.id,
        config_hash=hashlib.sha256(config.encode()).hexdigest()[:12],
        hardware=HardwareKey(STATED, work.device or UNKNOWN, work.ranks or 1),
        tokens_per_step=work.tokens_per_step,
        values={name: {0: value} for name, value in numbers.items() if value is not None},
        curves={
            name: (Curve.of(stated),) if (stated := stated_steps(run.steps, name)) else ()
            for name in (*CURVES, TOKENS)
        },
        loss_bound=EXACT_BOUNDS.get(dtype, UNIT_ROUNDOFF.get(dtype, UNIT_ROUNDOFF["bf16"])),
        not_steady=int(shown.pace.milliseconds is None),
        workload=work,
    )


def _largest(run: ImportedRun, name: str) -> float | None:
    """Bytes, over its steps; None where no step states any."""
    return max(stated_steps(run.steps, name).values(), default=None)


def shared_metric(metric: Metric, base: CellSamples, head: CellSamples) -> Metric | None:
    """`metric`, or the first of its alternatives, that both sides have; None if there is none.

    A ledger's peak that was measured is not compared with one that is a bound.
    """
    options = [
        option
        for option in metric.alternatives or (metric,)
        if option is not LEDGER_PEAK
        or {base.ledger_is_measured, head.ledger_is_measured} != {True, False}
    ]
    return next((option for option in options if base.of(option) and head.of(option)), None)


def _by_block(runs: Sequence[Run], metric: Metric) -> dict[int, float]:
    numbers = ((run.record.status.repeat, run.value(metric)) for run in runs)
    return {block: value for block, value in numbers if value is not None and isfinite(value)}
