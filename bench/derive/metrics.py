"""Every number that is compared, judged or shown, as one object each.

Policies, gates, `compare` and the columns of reports read the list `METRICS`:
a metric that is added here is known to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from bench.derive.counts import COUNTED
from bench.derive.live_storage import live_storage
from bench.record import RunRecord, RunSummary

Unit = Literal["ms", "tokens/s", "bytes", "loss", "share", "count", ""]
Direction = Literal["lower_is_better", "higher_is_better", "both"]
Requirement = Literal["required", "advisory", "off"]
LossMode = Literal["spread", "bitwise"]
Judge = Literal["interval", "ratio", "curve", "count"]
"""interval: of the paired ratio over blocks, for what varies from run to run. ratio: of medians,
for what repeats almost exactly. curve: step by step. count: exact, and a rise names what
rose and who called it."""


@dataclass(frozen=True)
class MetricRule:
    """What a policy asks of one metric.

    tolerance: relative change (0.02 is 2 %) that is still called equal; of a curve the largest
    relative distance from the base's, None meaning the bound of the dtype policy. direction: "both"
    calls every change beyond the tolerance a regression. named: whether the file asks for it; a
    required metric that is named in the file must be measured. improve: relative change for the
    better that must be shown, in the place of a tolerance; 0 asks for none.
    """

    gate: Requirement
    tolerance: float | None
    direction: Direction = "lower_is_better"
    mode: LossMode = "spread"
    named: bool = False
    improve: float = 0.0

    @property
    def aim(self) -> float:
        """The ratio head / base that the improvement comes to."""
        return 1 - self.improve if self.direction == "lower_is_better" else 1 + self.improve


@dataclass(frozen=True)
class Metric:
    """A number of a run.

    name: in policies, baselines and JSON. title: in tables and sentences. of: its value in
    `unit`, None where it was not measured. judge, rule: how it is judged, and the default policy;
    None for numbers that are shown only. least_tolerance: no smaller one is used. alternatives: in
    the place of `of`, the first of these metrics that all sides have. column: whether the table of
    cells shows it. missing: why there is no number, in a word or two; "" for nothing to say.
    """

    name: str
    title: str
    unit: Unit
    of: Callable[[RunRecord, RunSummary], float | None]
    judge: Judge | None = None
    rule: MetricRule | None = None
    least_tolerance: float = 0.0
    alternatives: tuple[Metric, ...] = ()
    column: bool = True
    missing: Callable[[RunSummary], str] = field(default=lambda _: "")


def _derived(name: str) -> Callable[[RunRecord, RunSummary], float | None]:
    """A number of the run's summary."""

    def of(_: RunRecord, summary: RunSummary) -> float | None:
        value = getattr(summary, name)
        return None if value is None else float(value)

    return of


def _allocator_peak(record: RunRecord, summary: RunSummary) -> float | None:
    on_cpu = (record.memory or {}).get("cpu_allocator_peak_bytes")
    if isinstance(on_cpu, int | float) and not isinstance(on_cpu, bool):
        return float(on_cpu)
    return None if summary.device_peak_bytes is None else float(summary.device_peak_bytes)


def _memory(record: RunRecord, summary: RunSummary) -> float | None:
    values = (peak.of(record, summary) for peak in MEMORY_PEAKS)
    return next((value for value in values if value is not None), None)


def _live_storage(record: RunRecord, _: RunSummary) -> float | None:
    live = live_storage(record)
    return None if live is None else live.bytes_per_rank


def _why_no_mfu(summary: RunSummary) -> str:
    if any("invalid" in note for note in summary.notes):
        return "invalid"
    if any("no bf16 peak" in note or "peak known" in note for note in summary.notes):
        return "no peak for dtype"
    return "unknown device"


def _unit(name: str) -> Unit:
    return "bytes" if name.endswith("_bytes") else "count"


def _count(name: str) -> Callable[[RunRecord, RunSummary], float | None]:
    return lambda _, summary: summary.counts.get(name)


_TIME: Final = MetricRule("required", 0.02)
_PEAK: Final = MetricRule("off", 0.005)
_EXACT: Final = MetricRule("required", 0.0)
_CURVE: Final = MetricRule("required", None, "both")

STEP_TIME = Metric(
    "step_time", "step (ms)", "ms", _derived("step_milliseconds_median"), "interval", _TIME
)
STEP_TIME_P90 = Metric("step_time_p90", "p90 (ms)", "ms", _derived("step_milliseconds_p90"))
THROUGHPUT = Metric(
    "throughput",
    "tokens/s",
    "tokens/s",
    _derived("tokens_per_second"),
    "interval",
    MetricRule("off", 0.02, "higher_is_better"),
)
CPU_TIME = Metric(
    "cpu_time",
    "CPU ms",
    "ms",
    _derived("cpu_milliseconds_median"),
    "interval",
    MetricRule("advisory", 0.02),
)
"""Of a step, over all ranks and their threads. Where others use the machine too, it repeats better
than wall time; it does not see waiting."""
TFLOPS = Metric("tflops", "TFLOP/s per device", "", _derived("tflops_per_second_per_device"))
MFU = Metric("mfu", "MFU", "share", _derived("mfu"), missing=_why_no_mfu)
LOSS = Metric("loss", "final loss", "loss", _derived("final_loss"), "curve", _CURVE)
GRAD_NORM = Metric("grad_norm", "grad norm", "", _derived("final_grad_norm"), "curve", _CURVE)
"""Of the whole gradient before clipping. A wrong scale shows here alone: Adam undoes it."""
ALLOCATOR_PEAK = Metric(
    "allocator_peak", "allocator peak", "bytes", _allocator_peak, "ratio", _PEAK
)
LEDGER_PEAK = Metric(
    "ledger_peak", "ledger peak", "bytes", _derived("ledger_peak_bytes"), "ratio", _PEAK
)
# A resident set repeats less exactly than an allocator's peak.
RSS = Metric(
    "rss", "RSS peak", "bytes", _derived("rss_peak_bytes"), "ratio", MetricRule("off", 0.05), 0.05
)
MEMORY_PEAKS = (ALLOCATOR_PEAK, LEDGER_PEAK, RSS)
"""The first that is known counts. Columns of tables where a cell has them."""
RESERVED_PEAK = Metric("reserved_peak", "reserved peak", "bytes", lambda *_: None)
MEMORY_NOT_SAID = Metric("memory_not_said", "memory, kind not said", "bytes", lambda *_: None)
"""Like the reserved peak, of imported logs alone."""
MEMORY = Metric(
    "memory",
    "memory",
    "bytes",
    _memory,
    "ratio",
    MetricRule("required", 0.005),
    alternatives=(*MEMORY_PEAKS, RESERVED_PEAK, MEMORY_NOT_SAID),
    column=False,
)
LIVE_STORAGE = Metric(
    "live_storage", "live storage", "bytes", _live_storage, "ratio", _EXACT, column=False
)
"""Of a rank between two steps, every tensor storage, whoever holds it."""
WIRE_BYTES = Metric(
    "wire_bytes", "bytes sent per step", "bytes", _derived("wire_bytes_per_step"), "ratio", _EXACT
)

COUNTS: tuple[Metric, ...] = tuple(
    Metric(name, title, _unit(name), _count(name), "count", _EXACT, column=False)
    for name, (title, _) in COUNTED.items()
)
"""What a step does, of runs with `measure.counts`; per step, over all ranks."""

CURVES: tuple[str, ...] = (LOSS.name, GRAD_NORM.name)
"""Judged step by step."""
JUDGED_IF_MEASURED: tuple[Metric, ...] = (CPU_TIME, LIVE_STORAGE, *COUNTS)
"""Where they were not measured, only a policy that names them requires them."""

METRICS: list[Metric] = [
    *(STEP_TIME, STEP_TIME_P90, THROUGHPUT, CPU_TIME, TFLOPS, MFU, MEMORY, LOSS, GRAD_NORM),
    *(*MEMORY_PEAKS, LIVE_STORAGE, WIRE_BYTES, *COUNTS),
]
"""In the order in which tables show them."""


def judged_metrics() -> Mapping[str, Metric]:
    """Those that a policy has a rule for, by name."""
    return {metric.name: metric for metric in METRICS if metric.rule is not None}


def default_rules() -> dict[str, MetricRule]:
    """The default policy.

    Time may change by 2 %, allocator peaks and ledgers by 0.5 %; counted bytes not at all.
    """
    return {metric.name: metric.rule for metric in METRICS if metric.rule is not None}
