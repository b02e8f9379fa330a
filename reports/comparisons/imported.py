"""Imported runs beside measured ones: what each says, and what its source does not say.

No verdict is given. A log has no noise floor, no proof of code and often no hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.derive.metrics import LOSS, STEP_TIME, THROUGHPUT
from bench.store.imports import ImportedRun
from bench.workload import Workload
from reports.renderers import quantity
from reports.renderers.table import Table
from reports.views.cells import Cell

ABSENT = "absent"
CAPTION = (
    "Imported runs say what their logs say; absent is what they do not say. Their times are the "
    "median of all steps that have one. There is no verdict between an imported and a measured run."
)


@dataclass(frozen=True)
class Shown:
    """One run of either kind; None is absent. origin: `measured`, or importer and log."""

    name: str
    origin: str
    workload: Workload
    steps: int
    milliseconds: float | None
    tokens_per_second: float | None
    loss: float | None
    absent: tuple[str, ...] = ()


def of_import(run: ImportedRun) -> Shown:
    """The numbers of a log; tokens/s only where it tells tokens and times, or a rate and ranks."""
    times = [step.milliseconds for step in run.steps if step.milliseconds is not None]
    losses = [step.loss for step in run.steps if step.loss is not None]
    usual = run.workload.tokens_per_step
    rates = [
        tokens / step.milliseconds * 1e3
        for step in run.steps
        if step.milliseconds and (tokens := step.tokens or usual) is not None
    ] or [
        step.tokens_per_second_per_device * run.workload.ranks
        for step in run.steps
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
        origin.absent,
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
    )


def side_by_side(shown: Iterable[Shown]) -> Table:
    """One row per run."""
    return Table.of(
        "run | from | engine | model | device | ranks | batch | sequence | ms per step | tokens/s"
        " | loss",
        map(_row, shown),
        left=5,
    )


def absences(shown: Iterable[Shown]) -> list[tuple[str, str]]:
    """(run, what its importer looked for and did not find)."""
    return [(one.name, ", ".join(one.absent)) for one in shown if one.absent]


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
            "absent": list(one.absent),
        }
        for one in shown
    ]


def _row(one: Shown) -> tuple[str, ...]:
    work = one.workload
    named = (work.engine or work.framework, work.model, work.device)
    counts = (work.ranks, work.global_batch, work.seq_len)
    numbers = (
        ABSENT if one.milliseconds is None else quantity.significant(one.milliseconds),
        ABSENT if one.tokens_per_second is None else quantity.significant(one.tokens_per_second),
        ABSENT if one.loss is None else quantity.loss(one.loss),
    )
    words = (text or ABSENT for text in named)
    shown = (ABSENT if count is None else f"{count:,}" for count in counts)
    return (one.name, one.origin, *words, *shown, *numbers)
