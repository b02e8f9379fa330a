"""What a sweep would run on one machine, decided before any process starts; `plan.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bench.errors import UsageError, first_problem
from bench.spec import ResolvedRun
from bench.store.layout import IDENTITY_DIGITS

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
    def runs(self) -> Mapping[str, ResolvedRun]:
        """By arm; under "" where arms do not differ in settings."""
        return self.by_arm or {"": self.resolved}

    def name_of(self, arm: str) -> str:
        """`cell arm`, or the cell alone for ""."""
        return f"{self.id} {arm}".rstrip()

    @property
    def config_hashes(self) -> tuple[str, ...]:
        """Of the runs of all arms, each once."""
        return tuple(dict.fromkeys(run.config_hash for run in self.runs.values()))


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
    is drawn; else all of the first arm, then all of the next.
    """

    id: str
    name: str
    description: str
    source: str
    fixed: Mapping[str, Any] | None = None
    interleaved: bool = False
    arms: tuple[PlannedArm, ...] = ()
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

    @property
    def arm_names(self) -> tuple[str, ...]:
        """In their order; the first is the base, unless one is called so."""
        return tuple(arm.name for arm in self.arms)

    @property
    def codes(self) -> dict[tuple[str, str | None], str]:
        """Cell and arm -> the code that the arm was when the plan was made."""
        return {(cell, arm.name): code for arm in self.arms for cell, code in arm.codes.items()}

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
