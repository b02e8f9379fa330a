"""From a sweep file to what it would run on one machine: expand, prune, merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from bench.errors import UnsupportedError
from bench.launch.arm.request import ArmRequest
from bench.resolve.machine import Machine
from bench.spec import ResolvedRun
from sweeps.definition import SweepDefinition
from sweeps.matrix import ARM, MatrixCell, expand, pinned
from sweeps.plan import DuplicateCell, Plan, PlannedCell, PlannedTarget, PrunedCell
from sweeps.prune import judge
from sweeps.selection import variant_name
from sweeps.settings import Settings, short_path


def sweep_cells(definition: SweepDefinition, fixed: Settings) -> tuple[MatrixCell, ...]:
    """The cells of a sweep with the settings that the command line fixed."""
    return expand(pinned(definition.matrix, fixed))


def _cells_by_arm(
    definition: SweepDefinition, fixed: Settings, arms: Sequence[ArmRequest]
) -> dict[str, tuple[MatrixCell, ...]]:
    """The cells as each arm runs them, under "" where all arms run the same."""
    matrix = pinned(definition.matrix, fixed)
    if not any(arm.settings for arm in arms):
        return {"": expand(matrix)}
    return {
        arm.name: expand(
            matrix, arm.name, {k: v for k, v in arm.settings.items() if k not in fixed}
        )
        for arm in arms
    }


def make_plan(
    definition: SweepDefinition,
    machine: Machine,
    *,
    fixed: Settings | None = None,
    repeat: int | None = None,
    arms: Sequence[ArmRequest] = (),
) -> Plan:
    """Expand, prune and merge.

    Args:
        definition: the checked sweep file.
        machine: where it would run.
        fixed: settings of `--set`, by full path.
        repeat: runs of each cell, instead of the file's number.
        arms: what runs the cells; a cell that one of them cannot run is pruned for all.

    Raises:
        SweepFileError: a cell that is wrong on every machine.
    """
    settings = dict(fixed or {})
    planned: dict[tuple[str, ...], PlannedCell] = {}
    pruned: list[PrunedCell] = []
    duplicates: list[DuplicateCell] = []
    sides = {
        arm: judge(
            cells,
            machine,
            source=definition.source,
            base_lines=definition.base_lines,
            fixed=settings,
        )
        for arm, cells in _cells_by_arm(definition, settings, arms).items()
    }
    for items in zip(*sides.values(), strict=True):
        outcome = _as_planned(dict(zip(sides, items, strict=True)), repeat or definition.repeat)
        if isinstance(outcome, PrunedCell):
            pruned.append(outcome)
            continue
        hashes = tuple(run.config_hash for run in (outcome.resolved, *outcome.by_arm.values()))
        if hashes in planned:
            first = planned[hashes].id
            reason = f"resolves to the same run as {first} (config {hashes[0]})"
            duplicates.append(DuplicateCell(outcome.id, outcome.labels, first, reason))
            continue
        planned[hashes] = outcome
    return Plan(
        id=variant_name(definition.name, settings),
        name=definition.name,
        description=definition.description,
        source=PurePath(definition.source).name,
        cells=tuple(planned.values()),
        pruned=tuple(pruned),
        duplicates=tuple(duplicates),
        fixed={short_path(path): value for path, value in settings.items()},
        targets=_targets(definition, settings),
        pack=definition.pack,
    )


def _targets(definition: SweepDefinition, fixed: Settings) -> tuple[PlannedTarget, ...]:
    """How large head / base of a metric may be, in the order of the cells."""
    if not definition.targets:
        return ()
    return tuple(
        PlannedTarget(cell.id, target.base, target.head, metric, bound)
        for cell in sweep_cells(definition, fixed)
        for target in definition.targets
        if target.when.matches(cell)
        for metric, bound in target.at_most.items()
    )


def _as_planned(
    items: Mapping[str, tuple[MatrixCell, ResolvedRun | UnsupportedError]], repeats: int
) -> PlannedCell | PrunedCell:
    """One cell, judged for every arm (under "" for all of them)."""
    by_arm: dict[str, ResolvedRun] = {}
    for arm, (cell, found) in items.items():
        labels = {name: label for name, label in cell.labels.items() if name != ARM}
        if isinstance(found, UnsupportedError):
            reason = f"arm {arm}: {found.reason}" if arm else found.reason
            return PrunedCell(cell.id, labels, found.rule, reason)
        by_arm[arm] = found
    resolved = next(iter(by_arm.values()))
    return PlannedCell(cell.id, labels, resolved, repeats, {k: v for k, v in by_arm.items() if k})
