"""The results of a sweep in one table, for the end of `run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench.derive.metrics import LOSS, STEP_TIME, THROUGHPUT, Metric
from bench.store import ResultsStore
from reports.comparisons.change import memory_metric
from reports.renderers import quantity
from reports.renderers.table import Row, RowKind, Table
from reports.views.cells import Cell
from reports.views.sweep_view import load_sweeps
from sweeps.plan import Plan


def results_table(store: ResultsStore, plan: Plan) -> Table | None:
    """A row per cell of `plan` with a run, new or from before; None where there is none."""
    chosen = {cell.id for cell in plan.cells}
    view = load_sweeps(store, [plan.id])[0]
    cells = [cell for cell in view.cells if cell.name_without_arm in chosen]
    if not cells:
        return None
    memory = memory_metric([cell for cell in cells if cell.finished])
    metrics = [STEP_TIME, THROUGHPUT, LOSS]
    metrics += [] if memory is None else [memory]
    titles = ("cell", "runs", *(metric.title for metric in metrics))
    return Table.of(titles, (_row(cell, metrics) for cell in cells))


def _row(cell: Cell, metrics: Sequence[Metric]) -> Row:
    states = Counter(run.record.status.state for run in cell.runs)
    failed = [run for run in cell.runs if not run.finished]
    kind: RowKind = "bad" if failed else "plain" if cell.n else "unsteady"
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    numbers = (quantity.amount(cell.value(metric), metric.unit) for metric in metrics)
    return Row((cell.name, counts, *numbers), kind)
