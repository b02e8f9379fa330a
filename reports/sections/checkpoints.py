"""What saving checkpoints cost, cell by cell."""

from __future__ import annotations

from statistics import median

from bench.derive.checkpoints import CheckpointCost, checkpoint_cost
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Section, TableBlock
from reports.renderers.table import Table
from reports.views.cells import Cell

_CAPTION = (
    "Median time of rank 0 from the call to its return, between two steps and outside of their "
    "times; bytes of all ranks together. The host may still be writing when the call returns."
)


def checkpoints_section(findings: Findings) -> Section | None:
    """None where no run saved a checkpoint."""
    rows = [row for cell in findings.finished if (row := _row(cell)) is not None]
    if not rows:
        return None
    table = Table.of("cell | every steps | saves | median ms | bytes", rows)
    return Section("checkpoints", "Checkpoints", (TableBlock(table, _CAPTION),))


def _row(cell: Cell) -> tuple[str, ...] | None:
    found = [checkpoint_cost(run.record) for run in cell.finished]
    costs: list[CheckpointCost] = [cost for cost in found if cost is not None and cost.saves]
    if not costs:
        return None
    times = [save.milliseconds for cost in costs for save in cost.saves]
    return (
        cell.name,
        str(costs[0].every_steps),
        str(len(times)),
        quantity.significant(median(times)),
        quantity.binary_bytes(max(cost.largest_bytes for cost in costs)),
    )
