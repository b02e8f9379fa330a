"""The results of a sweep in one table, for the end of `run`."""

from __future__ import annotations

from collections import Counter

from bench.store import ResultsStore
from reports.comparisons.change import MEMORY_TITLES, MemoryMetric, memory_bytes, memory_metric
from reports.renderers import quantity
from reports.renderers.table import Row, RowKind, Table, columns
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
    metric = memory_metric([cell for cell in cells if cell.finished])
    memory = [] if metric is None else [MEMORY_TITLES[metric]]
    titles = columns("cell", "runs", "step (ms)", "tokens/s", "final loss", *memory, left=1)
    return Table(titles, tuple(_row(cell, metric) for cell in cells))


def _row(cell: Cell, metric: MemoryMetric | None) -> Row:
    states = Counter(run.record.status.state for run in cell.runs)
    failed = [run for run in cell.runs if not run.finished]
    kind: RowKind = "bad" if failed else "plain" if cell.n else "unsteady"
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    texts = [
        cell.name,
        counts,
        quantity.significant(cell.value("step_milliseconds_median")),
        quantity.significant(cell.value("tokens_per_second")),
        quantity.significant(cell.value("final_loss"), 5),
    ]
    if metric is not None:
        texts.append(quantity.binary_bytes(memory_bytes(cell, metric)))
    return Row(tuple(texts), kind)
