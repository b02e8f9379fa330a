"""Imported runs beside measured ones: what each says, and what its source does not say.

No verdict is given. A log has no noise floor, no proof of code and often no hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from bench.derive.metrics import ALLOCATOR_PEAK, LOSS, STEP_TIME, THROUGHPUT
from bench.store.imports import ImportedRun
from bench.workload import ImportedStep, Workload
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

    run: what was imported, None for a measured cell.
    """

    name: str
    origin: str
    workload: Workload
    steps: int
    milliseconds: float | None
    tokens_per_second: float | None
    loss: float | None
    peak_bytes: float | None = None
    absent: tuple[str, ...] = ()
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
    times = [step.milliseconds for step in steps if step.milliseconds is not None]
    losses = [step.loss for step in run.steps if step.loss is not None]
    usual = run.workload.tokens_per_step
    rates = [
        tokens / step.milliseconds * 1e3
        for step in steps
        if step.milliseconds and (tokens := step.tokens or usual) is not None
    ] or [
        step.tokens_per_second_per_device * run.workload.ranks
        for step in steps
        if step.tokens_per_second_per_device is not None and run.workload.ranks
    ]
    origin = run.provenance
    return Shown(
        run.id,
        f"{origin.importer or 'unknown importer'}: {origin.source or 'unknown log'}",
        run.workload,
        len(run.steps),
        median(times) if times else None,
        median(rates) if rates else None,
        losses[-1] if losses else None,
        max((one.device_peak_bytes for one in run.steps if one.device_peak_bytes), default=None),
        origin.absent,
        run,
    )


def of_cell(cell: Cell) -> Shown:
    """The medians of a measured cell."""
    record = cell.runs[0].record
    return Shown(
        cell.name,
        "measured",
        record.workload,
        record.resolved.train.steps,
        cell.value(STEP_TIME),
        cell.value(THROUGHPUT),
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
    found: dict[str, list[str]] = {}
    for one in shown:
        if one.absent:
            found.setdefault(", ".join(one.absent), []).append(one.name)
    return [(", ".join(names), missing) for missing, names in found.items()]


def to_data(shown: Sequence[Shown]) -> list[dict[str, object]]:
    """As plain JSON data; null is absent."""
    return [
        {
            "name": one.name,
            "origin": one.origin,
            "workload": one.workload.model_dump(mode="json"),
            "steps": one.steps,
            "step_milliseconds_median": one.milliseconds,
            "tokens_per_second": one.tokens_per_second,
            "final_loss": one.loss,
            "device_peak_bytes": one.peak_bytes,
            "absent": list(one.absent),
        }
        | ({} if one.run is None else _said(one.run))
        for one in shown
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


def _row(one: Shown) -> tuple[str, ...]:
    work = one.workload
    named = (work.engine or work.framework, work.model, work.device)
    counts = (work.ranks, work.global_batch, work.seq_len)
    numbers = (
        ABSENT if one.milliseconds is None else quantity.significant(one.milliseconds),
        ABSENT if one.tokens_per_second is None else quantity.significant(one.tokens_per_second),
        ABSENT if one.peak_bytes is None else quantity.binary_bytes(one.peak_bytes),
        ABSENT if one.loss is None else quantity.loss(one.loss),
    )
    words = (text or ABSENT for text in named)
    shown = (ABSENT if count is None else f"{count:,}" for count in counts)
    return (one.name, one.origin, *words, *shown, *numbers)
