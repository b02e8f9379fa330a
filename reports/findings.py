"""Everything a report says, computed once from the sweeps and shared by its sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.derive.hardware import hardware_key
from reports.cells import Cell
from reports.change import Change, MemoryMetric, change_between, memory_metric
from reports.parity import ParityGroup, ParityRow, parity_groups
from reports.plots.style import Look, looks
from reports.reference import choose_reference
from reports.sweep_view import SweepView
from reports.tradeoffs import Flag, tradeoff_flags


@dataclass(frozen=True)
class Findings:
    """`changes`: cells against `reference`, only on the reference's hardware.

    other_hardware: measured cells that ran on different hardware and are therefore not compared.
    """

    sweeps: tuple[SweepView, ...]
    cells: tuple[Cell, ...]
    reference: Cell | None
    reference_was_named: bool
    changes: tuple[Change, ...]
    other_hardware: tuple[Cell, ...]
    parity: tuple[ParityGroup, ...]
    flags: tuple[Flag, ...]
    memory_metric: MemoryMetric | None
    looks: Mapping[str, Look]

    @property
    def measured(self) -> tuple[Cell, ...]:
        """Cells with at least one run whose time counts."""
        return tuple(cell for cell in self.cells if cell.n)

    @property
    def finished(self) -> tuple[Cell, ...]:
        """Cells with at least one run whose loss and memory count."""
        return tuple(cell for cell in self.cells if cell.finished)

    @property
    def planned(self) -> int:
        """Cells that the sweeps planned to run, without the pruned ones."""
        return sum(sweep.planned for sweep in self.sweeps)


def find(sweeps: Sequence[SweepView], reference_name: str | None = None) -> Findings:
    """Compute all comparisons.

    Raises:
        UsageError: `reference_name` is no cell that was measured.
    """
    cells = tuple(cell for sweep in sweeps for cell in sweep.cells)
    reference = choose_reference(cells, reference_name, lambda cell: cell.n > 0)
    changes, elsewhere = _changes(cells, reference)
    groups = tuple(parity_groups(cells))
    rows: dict[str, ParityRow] = {row.cell.name: row for group in groups for row in group.rows}
    return Findings(
        sweeps=tuple(sweeps),
        cells=cells,
        reference=reference,
        reference_was_named=reference_name is not None,
        changes=changes,
        other_hardware=elsewhere,
        parity=groups,
        flags=tuple(tradeoff_flags(changes, rows)),
        memory_metric=memory_metric([cell for cell in cells if cell.n]),
        looks=looks(cells),
    )


def _changes(
    cells: Sequence[Cell], reference: Cell | None
) -> tuple[tuple[Change, ...], tuple[Cell, ...]]:
    if reference is None:
        return (), ()
    key = hardware_key(reference.measured[0].record)
    others = [cell for cell in cells if cell.n and cell is not reference]
    same = [cell for cell in others if hardware_key(cell.measured[0].record) == key]
    elsewhere = tuple(cell for cell in others if cell not in same)
    return tuple(change_between(reference, cell) for cell in same), elsewhere
