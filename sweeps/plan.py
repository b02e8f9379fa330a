"""What a sweep would run on one machine, decided before any process starts; `plan.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bench.errors import UnsupportedError, UsageError, first_problem
from bench.launch.arm.request import ArmRequest
from bench.resolve.machine import Machine
from bench.spec import ResolvedRun
from bench.store.layout import IDENTITY_DIGITS
from sweeps.definition import SweepDefinition
from sweeps.matrix import ARM, Cell, expand, pinned
from sweeps.prune import judge
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
    codes: cell -> identity of the code that the arm's runs of it measure. settings: of its runs,
    on top of their cell's.
    """

    name: str
    description: str
    commit: str | None
    dirty_hash: str | None
    torch: str
    python: str
    packages: Mapping[str, str] = field(default_factory=dict)
    codes: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def identity(arms: Sequence[PlannedArm]) -> str:
    """What the arms are, in hex digits: their names, settings and code, and not who calls it how.

    More cells of the same engines, or fewer, change nothing.
    """
    facts = [
        (arm.name, sorted(arm.settings.items()), sorted({*arm.codes.values()})) for arm in arms
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:IDENTITY_DIGITS]


@dataclass(frozen=True, kw_only=True)
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
    fixed: Mapping[str, Any] | None = None
    interleaved: bool = False
    seed: int | None = None
    until_decided: bool = False
    pack: bool = False
    turns: int = 1
    arms: tuple[PlannedArm, ...] = ()
    targets: tuple[PlannedTarget, ...] = ()
    cells: tuple[PlannedCell, ...]
    pruned: tuple[PrunedCell, ...] = ()
    duplicates: tuple[DuplicateCell, ...] = ()

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
        """Plain data for `plan.json`: every field, with the hashes that name the runs."""
        plain = _PLAN.dump_python(self, mode="json")
        plain["cells"] = [
            {
                "id": cell.id,
                "labels": dict(cell.labels),
                "repeats": cell.repeats,
                "config_hash": cell.resolved.config_hash,
                "slug": cell.resolved.slug,
                "resolved": item["resolved"],
                "by_arm": {
                    arm: {"config_hash": run.config_hash, "resolved": item["by_arm"][arm]}
                    for arm, run in cell.by_arm.items()
                },
            }
            for cell, item in zip(self.cells, plain["cells"], strict=True)
        ]
        named = {"set" if name == "fixed" else name: value for name, value in plain.items()}
        return {"plan_version": PLAN_VERSION, **named, "set": named["set"] or {}}

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
            cells = [
                {
                    **cell,
                    "by_arm": {k: run["resolved"] for k, run in cell.get("by_arm", {}).items()},
                }
                for cell in document["cells"]
            ]
            # Older plans lack fields that have a default.
            return _PLAN.validate_python({**document, "fixed": document["set"], "cells": cells})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            if isinstance(error, ValidationError):
                what = first_problem(error)
            raise UsageError(f"plan.json is damaged ({what}); plan the sweep again") from None


_PLAN: TypeAdapter[Plan] = TypeAdapter(Plan)


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


def _as_planned(
    items: Mapping[str, tuple[Cell, ResolvedRun | UnsupportedError]], repeats: int
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
