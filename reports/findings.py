"""Everything a report says, computed once from the sweeps and shared by its sections."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.derive.hardware import HardwareKey, hardware_key
from bench.derive.metrics import Metric
from bench.errors import UsageError
from bench.store import ResultsStore
from reports.compare.change import Change, Flag, memory_metric, tradeoff_flags
from reports.compare.judge import Verdicts, judge
from reports.compare.noise import calibrations
from reports.compare.parity import ParityGroup, ParityRow, parity_groups, wire_groups
from reports.compare.sides import sides_of_arms
from reports.views.cells import Cell
from reports.views.reference import choose_reference
from reports.views.sweep_view import SweepView, base_arm

_NOISE = "the noise calibration: "


@dataclass(frozen=True)
class Findings:
    """What was measured, compared.

    `changes`: cells against `reference`, or against the first arm of the same cell.

    Where sweeps have arms and no reference was named, arms are compared within their cell, and
    `reference` is that of the cells without arms, if any. other_hardware: measured cells that ran
    on different hardware than what they would be compared with. within_policy: cells without arms
    against the reference of their own dtype policy, problem and number of ranks. store: the
    results folder, for what exists besides the records of runs. wires: cells that differ in the
    dtypes of their gradients.
    judged: arms, block by block.
    """

    sweeps: tuple[SweepView, ...]
    cells: tuple[Cell, ...]
    reference: Cell | None
    reference_was_named: bool
    changes: tuple[Change, ...]
    other_hardware: tuple[Cell, ...]
    within_policy: tuple[Change, ...]
    parity: tuple[ParityGroup, ...]
    wires: tuple[ParityGroup, ...]
    flags: tuple[Flag, ...]
    memory_metric: Metric | None
    store: ResultsStore
    judged: tuple[Verdicts, ...]

    def is_reference(self, cell: Cell) -> bool:
        """Whether other cells are compared with `cell`."""
        return cell is self.reference or any(change.base is cell for change in self.changes)

    @property
    def not_in_blocks(self) -> tuple[Change, ...]:
        """The changes that `judged` does not have block by block."""
        in_blocks = {(j.sides.head, pair.label) for j in self.judged for pair in j.sides.pairs}
        return tuple(
            change
            for change in self.changes
            if change.base.name_without_arm != change.head.name_without_arm
            or change.head.block_name not in in_blocks
        )

    @property
    def measured(self) -> tuple[Cell, ...]:
        """Cells with at least one run whose time counts."""
        return tuple(cell for cell in self.cells if cell.n)

    @property
    def finished(self) -> tuple[Cell, ...]:
        """Cells with at least one run whose loss and memory count."""
        return tuple(cell for cell in self.cells if cell.finished)

    @property
    def without_a_time(self) -> tuple[Cell, ...]:
        """Finished cells of which no run's time counts."""
        return tuple(cell for cell in self.finished if not cell.n)

    @property
    def planned(self) -> int:
        """Cells that the sweeps planned to run, without the pruned ones."""
        return sum(sweep.planned for sweep in self.sweeps)


def find(
    store: ResultsStore, sweeps: Sequence[SweepView], reference_name: str | None = None
) -> Findings:
    """Compute all comparisons of `sweeps`, which are in `store`.

    Raises:
        UsageError: `reference_name` is no cell that was measured.
    """
    cells = tuple(cell for sweep in sweeps for cell in sweep.cells)
    within = {} if reference_name else _bases(sweeps)
    alone = cells if reference_name else [cell for cell in cells if cell.name not in within]
    reference = choose_reference(alone, reference_name, lambda cell: cell.n > 0)
    changes, elsewhere = _changes(cells, reference, within)
    groups = tuple(parity_groups(cells))
    rows: dict[str, ParityRow] = {row.cell.name: row for group in groups for row in group.rows}
    return Findings(
        sweeps=tuple(sweeps),
        cells=cells,
        reference=reference,
        reference_was_named=reference_name is not None,
        changes=changes,
        other_hardware=elsewhere,
        within_policy=_within_policy(groups, set(within)),
        parity=groups,
        wires=tuple(wire_groups(cells)),
        flags=tuple(tradeoff_flags(changes, rows)),
        memory_metric=memory_metric([cell for cell in cells if cell.n]),
        store=store,
        judged=_arms_judged(store, sweeps),
    )


def _arms_judged(store: ResultsStore, sweeps: Sequence[SweepView]) -> tuple[Verdicts, ...]:
    """Every other arm against the first, by the default policy, where any can be compared."""
    verdicts = []
    for sweep in sweeps:
        for head in sweep.arms:
            base = base_arm(sweep.arms)
            if head == base:
                continue
            try:
                sides = sides_of_arms(store, sweep.id, base, head)
            except UsageError:  # the plan cannot be read; the section on what is missing says so
                continue
            try:
                verdicts.append(judge(sides, calibrations=calibrations(store)))
            except UsageError as error:  # a damaged calibration does not cost the report
                verdicts.append(judge(replace(sides, notes=(*sides.notes, f"{_NOISE}{error}"))))
    return tuple(judged for judged in verdicts if not judged.nothing_comparable)


def _within_policy(groups: Sequence[ParityGroup], arms: Collection[str]) -> tuple[Change, ...]:
    """Like with like: what a headline may call faster."""
    alike: dict[tuple[int, int, HardwareKey], list[Cell]] = {}
    for number, group in enumerate(groups):
        for cell in (row.cell for row in group.rows):
            if cell.n and cell.name not in arms:
                record = cell.measured[0].record
                key = (number, record.resolved.launch.ranks, hardware_key(record))
                alike.setdefault(key, []).append(cell)
    changes = []
    for members in alike.values():
        base = choose_reference(members, None, lambda cell: cell.n > 0)
        changes += [Change(base, cell) for cell in members if base and not base.is_same(cell)]
    return tuple(changes)


def _bases(sweeps: Sequence[SweepView]) -> dict[str, Cell | None]:
    """By name, every cell that is an arm -> the first arm of the same cell, None where it has none.

    A sweep with one arm compares nothing by arms: its cells are compared as any others.
    """
    bases: dict[str, Cell | None] = {}
    for sweep in sweeps:
        if len(sweep.arms) <= 1:
            continue
        base = base_arm(sweep.arms)
        first = {cell.name_without_arm: cell for cell in sweep.cells if cell.arm == base}
        bases |= {cell.name: first.get(cell.name_without_arm) for cell in sweep.cells if cell.arm}
    return bases


def _changes(
    cells: Sequence[Cell], reference: Cell | None, within: Mapping[str, Cell | None]
) -> tuple[tuple[Change, ...], tuple[Cell, ...]]:
    changes, elsewhere = [], []
    for cell in cells:
        base = within.get(cell.name, reference)
        if base is None or base.is_same(cell) or not (base.n and cell.n):
            continue
        if hardware_key(cell.measured[0].record) == hardware_key(base.measured[0].record):
            changes.append(Change(base, cell))
        else:
            elsewhere.append(cell)
    return tuple(changes), tuple(elsewhere)
