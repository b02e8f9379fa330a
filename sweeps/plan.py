"""What a sweep would run on one machine, decided before any process starts; `plan.json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import Any

from bench.errors import UsageError
from bench.launch.arm.request import ArmRequest
from bench.resolve.machine import Machine
from bench.spec import ResolvedRun
from sweeps.definition import SweepDefinition
from sweeps.matrix import ARM, Cell, expand, pinned
from sweeps.prune import Pruned, Runnable, judge
from sweeps.selection import variant_name
from sweeps.settings import Settings, short_path
from sweeps.targets import PlannedTarget, planned_targets

PLAN_VERSION = 1


@dataclass(frozen=True)
class PlannedCell:
    """A cell that will run `repeats` times, per arm where there are any.

    by_arm: what each arm runs, where arms differ in settings; `resolved` then is the first arm's.
    """

    id: str
    labels: Mapping[str, str]
    resolved: ResolvedRun
    repeats: int = 1
    by_arm: Mapping[str, ResolvedRun] = field(default_factory=dict)

    def of(self, arm: str | None) -> ResolvedRun:
        """The run that `arm` makes of this cell."""
        return self.by_arm.get(arm or "", self.resolved)

    @property
    def config_hashes(self) -> tuple[str, ...]:
        """Of the runs of all arms, each once."""
        runs = self.by_arm.values() or (self.resolved,)
        return tuple(dict.fromkeys(run.config_hash for run in runs))


@dataclass(frozen=True)
class PrunedCell:
    """A cell that cannot run on the machine of the plan."""

    id: str
    labels: Mapping[str, str]
    rule: str
    reason: str


@dataclass(frozen=True)
class DuplicateCell:
    """A cell that resolves to the same run as an earlier one, whose records count for both."""

    id: str
    labels: Mapping[str, str]
    same_as: str
    reason: str


@dataclass(frozen=True)
class PlannedArm:
    """One side of a comparison, as prepared for this plan; no path in it.

    commit and dirty_hash: of its checkout, None where git cannot say, or nothing was changed.
    codes: cell -> identity of the code that the arm's runs of it measure.
    """

    name: str
    description: str
    commit: str | None
    dirty_hash: str | None
    torch: str
    python: str
    packages: Mapping[str, str] = field(default_factory=dict)
    codes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """cells + pruned + duplicates is the whole matrix: no cell is ever lost silently.

    arms: every cell runs once per repeat and arm. interleaved: repeat by repeat, in an order that
    `seed` decides; else all of the first arm, then all of the next. until_decided: blocks were
    added until they decided, so that whoever judges them must allow for every look. pack: runs that
    leave a part of the machine free go on side by side. turns: that the arms of an interleaved
    block take within one start of each.
    """

    id: str
    name: str
    description: str
    source: str
    cells: tuple[PlannedCell, ...]
    pruned: tuple[PrunedCell, ...] = ()
    duplicates: tuple[DuplicateCell, ...] = ()
    fixed: Mapping[str, Any] | None = None
    arms: tuple[PlannedArm, ...] = ()
    interleaved: bool = False
    seed: int | None = None
    targets: tuple[PlannedTarget, ...] = ()
    until_decided: bool = False
    pack: bool = False
    turns: int = 1

    @property
    def size(self) -> int:
        """Cells of the matrix."""
        return len(self.cells) + len(self.pruned) + len(self.duplicates)

    @property
    def runs(self) -> int:
        """Runs that the plan asks for."""
        return sum(cell.repeats for cell in self.cells) * max(1, len(self.arms))

    def selected(self, kept: Iterable[str]) -> Plan:
        """The plan reduced to the cells in `kept`, and to those that stand in for one of them."""
        ids = set(kept)
        duplicates = tuple(cell for cell in self.duplicates if cell.id in ids)
        standing_in = ids | {cell.same_as for cell in duplicates}
        return replace(
            self,
            cells=tuple(cell for cell in self.cells if cell.id in standing_in),
            pruned=tuple(cell for cell in self.pruned if cell.id in ids),
            duplicates=duplicates,
        )

    def with_repeats(self, repeats: int) -> Plan:
        """The plan with `repeats` runs of every cell."""
        return replace(self, cells=tuple(replace(c, repeats=repeats) for c in self.cells))

    def to_document(self) -> dict[str, Any]:
        """Plain data for `plan.json`."""
        return {
            "plan_version": PLAN_VERSION,
            "id": self.id,
            "name": self.name,
            "description": self.description,
            "source": self.source,
            "set": dict(self.fixed or {}),
            "interleaved": self.interleaved,
            "seed": self.seed,
            "until_decided": self.until_decided,
            "pack": self.pack,
            "turns": self.turns,
            "arms": [asdict(arm) for arm in self.arms],
            "targets": [target.to_document() for target in self.targets],
            "cells": [
                {
                    "id": cell.id,
                    "labels": dict(cell.labels),
                    "repeats": cell.repeats,
                    "config_hash": cell.resolved.config_hash,
                    "slug": cell.resolved.slug,
                    "resolved": cell.resolved.model_dump(mode="json"),
                    "by_arm": {
                        arm: {
                            "config_hash": run.config_hash,
                            "resolved": run.model_dump(mode="json"),
                        }
                        for arm, run in cell.by_arm.items()
                    },
                }
                for cell in self.cells
            ],
            "pruned": [
                {"id": c.id, "labels": dict(c.labels), "rule": c.rule, "reason": c.reason}
                for c in self.pruned
            ],
            "duplicates": [
                {"id": c.id, "labels": dict(c.labels), "same_as": c.same_as, "reason": c.reason}
                for c in self.duplicates
            ],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Plan:
        """Read `plan.json` back.

        Raises:
            UsageError: damaged, or of a version that is not known here.
        """
        version = document.get("plan_version")
        if version != PLAN_VERSION:
            raise UsageError(f"plan.json: expected version {PLAN_VERSION}, found {version!r}")
        try:
            return _read(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = str(error).splitlines()[0]
            raise UsageError(
                f"plan.json is damaged ({type(error).__name__}: {what}); plan the sweep again"
            ) from None


def _read(document: Mapping[str, Any]) -> Plan:
    return Plan(
        id=document["id"],
        name=document["name"],
        description=document["description"],
        source=document["source"],
        fixed=dict(document["set"]),
        # Plans from before there were arms have none of the three.
        interleaved=bool(document.get("interleaved", False)),
        seed=document.get("seed"),
        until_decided=bool(document.get("until_decided", False)),
        pack=bool(document.get("pack", False)),
        turns=int(document.get("turns", 1)),
        arms=tuple(PlannedArm(**arm) for arm in document.get("arms", ())),
        targets=tuple(PlannedTarget(**target) for target in document.get("targets", ())),
        cells=tuple(
            PlannedCell(
                id=item["id"],
                labels=dict(item["labels"]),
                resolved=ResolvedRun.model_validate(item["resolved"]),
                repeats=int(item["repeats"]),
                by_arm={
                    arm: ResolvedRun.model_validate(run["resolved"])
                    for arm, run in item.get("by_arm", {}).items()
                },
            )
            for item in document["cells"]
        ),
        pruned=tuple(
            PrunedCell(item["id"], dict(item["labels"]), item["rule"], item["reason"])
            for item in document["pruned"]
        ),
        duplicates=tuple(
            DuplicateCell(item["id"], dict(item["labels"]), item["same_as"], item["reason"])
            for item in document["duplicates"]
        ),
    )


def sweep_cells(definition: SweepDefinition, fixed: Settings) -> tuple[Cell, ...]:
    """The cells of a sweep with the settings that the command line fixed."""
    return expand(pinned(definition.matrix, fixed))


def _cells_by_arm(
    definition: SweepDefinition, fixed: Settings, arms: Sequence[ArmRequest]
) -> dict[str, tuple[Cell, ...]]:
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
    if not definition.targets:
        return ()
    return planned_targets(definition.targets, sweep_cells(definition, fixed))


def _as_planned(items: Mapping[str, Runnable | Pruned], repeats: int) -> PlannedCell | PrunedCell:
    """One cell, judged for every arm (under "" for all of them)."""
    by_arm: dict[str, ResolvedRun] = {}
    for arm, item in items.items():
        labels = {name: label for name, label in item.cell.labels.items() if name != ARM}
        if isinstance(item, Pruned):
            reason = f"arm {arm}: {item.reason}" if arm else item.reason
            return PrunedCell(item.cell.id, labels, item.rule, reason)
        by_arm[arm] = item.resolved
    resolved = next(iter(by_arm.values()))
    return PlannedCell(
        item.cell.id, labels, resolved, repeats, {k: v for k, v in by_arm.items() if k}
    )
