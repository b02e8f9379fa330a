"""Baselines: named reference numbers, small enough to be reviewed in a pull request.

A baseline keeps run medians, not steps, and of a loss curve at most `CURVE_POINTS` points (with a
digest of all of them, so that bitwise equality can still be checked).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.derive.hardware import HardwareKey
from bench.errors import NotComparableError, NothingMeasuredError, UsageError
from reports.gates.cell_samples import MEMORY_METRICS, CellEvidence, LossCurve

BASELINE_VERSION = 1
CURVE_POINTS = 32

_NUMBER_LIST = re.compile(r"\[\s+([-+0-9.eE,\s]+?)\s+\]")


@dataclass(frozen=True)
class Baseline:
    """`history` says what was promoted over it: a line each, oldest first."""

    name: str
    sweep: str
    saved_utc: str
    cells: tuple[CellEvidence, ...]
    history: tuple[str, ...] = ()

    @property
    def hardware(self) -> HardwareKey:
        """The one kind of hardware of all its cells."""
        return self.cells[0].hardware

    @property
    def commit(self) -> str:
        """Commit of the first cell."""
        return self.cells[0].commit

    def to_text(self) -> str:
        """JSON, with lists of numbers on one line."""
        document = {
            "baseline_version": BASELINE_VERSION,
            "name": self.name,
            "sweep": self.sweep,
            "saved_utc": self.saved_utc,
            "hardware_key": self.hardware.slug,
            "hardware": asdict(self.hardware),
            "history": list(self.history),
            "cells": [_cell_document(cell) for cell in self.cells],
        }
        text = json.dumps(document, indent=1, ensure_ascii=False)
        return _NUMBER_LIST.sub(lambda m: f"[{' '.join(m.group(1).split())}]", text) + "\n"


def make_baseline(name: str, sweep: str, saved_utc: str, cells: Sequence[CellEvidence]) -> Baseline:
    """A baseline of the finished cells of a sweep.

    Raises:
        NothingMeasuredError: no cell.
        NotComparableError: the cells were measured on different hardware.
    """
    if not cells:
        raise NothingMeasuredError(f"{sweep} has no finished run: there is nothing to save")
    kinds = {cell.hardware for cell in cells}
    if len(kinds) > 1:
        found = "; ".join(sorted(kind.describe() for kind in kinds))
        raise NotComparableError(f"{sweep} was measured on different hardware: {found}")
    return Baseline(name, sweep, saved_utc, tuple(_thinned(cell) for cell in cells))


def read_baseline(document: Mapping[str, Any], source: str) -> Baseline:
    """A baseline from its JSON.

    Raises:
        NotComparableError: of another schema version.
        UsageError: damaged.
    """
    version = document.get("baseline_version")
    if version != BASELINE_VERSION:
        raise NotComparableError(
            f"{source}: baseline schema version {version!r}, this version compares "
            f"{BASELINE_VERSION}; save it again with this version"
        )
    try:
        hardware = HardwareKey(**document["hardware"])
        cells = tuple(_read_cell(item, hardware) for item in document["cells"])
        baseline = Baseline(
            name=str(document["name"]),
            sweep=str(document["sweep"]),
            saved_utc=str(document["saved_utc"]),
            cells=cells,
            history=tuple(str(line) for line in document["history"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{source} is damaged ({type(error).__name__}: {error}); save it again"
        ) from error
    if not cells:
        raise UsageError(f"{source} has no cell; save it again")
    return baseline


def promote(
    candidate: Baseline, current: Baseline | None, name: str, now: str, why: str
) -> Baseline:
    """`candidate` under `name`, in the place of `current`; the change is written into `history`.

    Raises:
        NotComparableError: other hardware, configurations or schema than `current`.
    """
    commit = candidate.commit[:12] or "unknown"
    line = f"{now}: {candidate.name} ({candidate.sweep}, commit {commit})"
    if why:
        line += f": {why}"
    if current is None:
        return replace(candidate, name=name, history=(*candidate.history, line))
    reason = _differs(candidate, current)
    if reason:
        raise NotComparableError(
            f"{candidate.name} cannot take the place of {name}: {reason}; give it another name"
        )
    return replace(candidate, name=name, history=(*current.history, line))


def _differs(candidate: Baseline, current: Baseline) -> str:
    if candidate.hardware != current.hardware:
        return (
            f"hardware differs: {candidate.hardware.describe()} and {current.hardware.describe()}"
        )
    ours = {(cell.config_hash, cell.schema_version): cell.name for cell in candidate.cells}
    theirs = {(cell.config_hash, cell.schema_version): cell.name for cell in current.cells}
    missing = [name for key, name in theirs.items() if key not in ours]
    if missing:
        return f"configurations differ: {', '.join(missing)} is not in {candidate.name}"
    return ""


def _thinned(cell: CellEvidence) -> CellEvidence:
    return replace(cell, curves=tuple(_thinned_curve(curve) for curve in cell.curves))


def _thinned_curve(curve: LossCurve) -> LossCurve:
    count = len(curve.steps)
    if count <= CURVE_POINTS:
        return curve
    kept = sorted({round(i * (count - 1) / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)})
    return replace(
        curve,
        steps=tuple(curve.steps[i] for i in kept),
        values=tuple(curve.values[i] for i in kept),
    )


def _cell_document(cell: CellEvidence) -> dict[str, Any]:
    curves: list[dict[str, Any]] = []
    for curve in cell.curves:  # repeats are often bitwise equal: one curve stands for all of them
        same = next((item for item in curves if item["digest"] == curve.digest), None)
        if same is None:
            curves.append({"runs": 1, **asdict(curve)})
        else:
            same["runs"] += 1
    return {
        "name": cell.name,
        "slug": cell.slug,
        "config_hash": cell.config_hash,
        "schema_version": cell.schema_version,
        "code": cell.code,
        "commit": cell.commit,
        "tokens_per_step": cell.tokens_per_step,
        "step_milliseconds": [round(value, 4) for value in cell.step_milliseconds.values()],
        "not_steady": cell.not_steady,
        "memory_bytes": {metric: list(values) for metric, values in cell.memory.items()},
        "wire_bytes": list(cell.wire_bytes),
        "loss_bound": cell.loss_bound,
        "losses": curves,
    }


def _read_cell(item: Mapping[str, Any], hardware: HardwareKey) -> CellEvidence:
    times = [float(value) for value in item["step_milliseconds"]]
    if any(value <= 0 for value in times):
        raise ValueError(f"{item['name']}: a step time that is not positive")
    memory = item["memory_bytes"]
    return CellEvidence(
        name=str(item["name"]),
        slug=str(item["slug"]),
        config_hash=str(item["config_hash"]),
        schema_version=int(item["schema_version"]),
        hardware=hardware,
        code=str(item["code"]),
        commit=str(item["commit"]),
        step_milliseconds=dict(enumerate(times)),
        tokens_per_step=float(item["tokens_per_step"]),
        memory={m: tuple(map(float, memory[m])) for m in MEMORY_METRICS if m in memory},
        wire_bytes=tuple(map(float, item["wire_bytes"])),
        curves=tuple(
            LossCurve(tuple(map(int, c["steps"])), tuple(map(float, c["values"])), str(c["digest"]))
            for c in item["losses"]
            for _ in range(int(c["runs"]))
        ),
        loss_bound=float(item["loss_bound"]),
        not_steady=int(item["not_steady"]),
    )
