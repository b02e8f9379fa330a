"""Baselines: named reference numbers, small enough to be reviewed in a pull request.

A baseline keeps run medians, not steps, and of a loss curve at most `CURVE_POINTS` points (with a
digest of all of them, so that bitwise equality can still be checked).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from bench.derive.counts import CountRow, StepCounts, by_name
from bench.derive.hardware import HardwareKey
from bench.derive.metrics import GRAD_NORM, LOSS, STEP_TIME
from bench.errors import NotComparableError, NothingMeasuredError, UsageError, first_problem
from bench.store.layout import checked_identifier
from bench.workload import Workload
from reports.compare.samples import TOKENS, CellSamples
from reports.compare.series import Curve
from reports.compare.unlike import only_compared

BASELINE_VERSION = 2
CURVE_POINTS = 32
_AMOUNTS = ("count", "bytes", "allocations", "allocated_bytes", "exposed")
_NUMBER_LIST = re.compile(r"\[\s+([-+0-9.eE,\s]+?)\s+\]")


class _Curves(BaseModel):
    """A curve that `runs` runs had, bit for bit."""

    runs: int
    steps: tuple[int, ...]
    values: tuple[float, ...]
    digest: str

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> list[_Curves]:
        """Repeats are often bitwise equal: one stands for all of them."""
        runs = Counter(curve.digest for curve in curves)
        distinct = {curve.digest: curve for curve in curves}
        return [cls(runs=runs[digest], **asdict(curve)) for digest, curve in distinct.items()]


class _CellDocument(BaseModel):
    """A cell as the file keeps it. values: metric -> one number per run.

    counts: what a step does, as kind -> operation and dtype -> `_AMOUNTS`; not who called. nodes:
    those of the runs, where they are known. workload: as far as it must agree.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    slug: str
    config_hash: str
    schema_version: int
    code: str
    commit: str
    tokens_per_step: float | None = None
    values: dict[str, list[Annotated[float, Field(allow_inf_nan=False)]]]
    not_steady: int
    loss_bound: float
    losses: list[_Curves]
    grad_norms: list[_Curves] = []
    tokens: list[_Curves] | None = None
    counts: dict[str, dict[str, list[int]]] = {}
    nodes: tuple[str, ...] = ()
    workload: Workload | None = None
    ledger_is_measured: bool | None = None

    @field_validator("values")
    @classmethod
    def _are_possible(cls, values: dict[str, list[float]]) -> dict[str, list[float]]:
        if any(value <= 0 for value in values.get(STEP_TIME.name, ())):
            raise ValueError("a step time that is not positive")
        for name, numbers in values.items():
            if min(numbers, default=0.0) < 0:
                raise ValueError(f"a {name} below zero")
        return values

    @classmethod
    def of(cls, cell: CellSamples) -> _CellDocument:
        counts: dict[str, dict[str, list[int]]] = {}
        for name, row in by_name(cell.counts.rows if cell.counts else ()).items():
            counts.setdefault(row.kind, {})[name] = [getattr(row, amount) for amount in _AMOUNTS]
        kept = {
            "values": {
                name: [_rounded(value) for value in by_block.values()]
                for name, by_block in cell.values.items()
            },
            "losses": _Curves.of(cell.curves[LOSS.name]),
            "grad_norms": _Curves.of(cell.curves[GRAD_NORM.name]),
            "tokens": _Curves.of(cell.curves.get(TOKENS, ())) or None,
            "nodes": tuple(sorted(cell.nodes)),
            "counts": counts,
            "workload": cell.workload and only_compared(cell.workload),
        }
        return cls(**{**vars(cell), **kept})

    def samples(self, hardware: HardwareKey) -> CellSamples:
        """The cell, measured on `hardware`; its numbers have lost their blocks."""
        rows = [
            CountRow.model_validate(
                {"operation": name, "kind": kind, **dict(zip(_AMOUNTS, amounts, strict=True))}
            )
            for kind, named in self.counts.items()
            for name, amounts in named.items()
        ]
        counts = StepCounts(ranks=1, units=1, microbatches=1, rows=tuple(rows)) if rows else None
        curves = {LOSS.name: self.losses, GRAD_NORM.name: self.grad_norms}
        curves |= {TOKENS: self.tokens} if self.tokens else {}
        read = {
            "values": {name: dict(enumerate(numbers)) for name, numbers in self.values.items()},
            "curves": {
                name: tuple(Curve(c.steps, c.values, c.digest) for c in kept for _ in range(c.runs))
                for name, kept in curves.items()
            },
            "counts": counts,
            "nodes": frozenset(self.nodes),
        }
        plain = {k: v for k, v in self if k not in ("losses", "grad_norms", "tokens")}
        return CellSamples(**{**plain, "hardware": hardware, **read})


def _rounded(value: float) -> float:
    """Four decimals, and six digits of what is smaller."""
    return round(value, 4) if abs(value) >= 1 else float(f"{value:.6g}")


def _identifier(name: str) -> str:
    """A name that `baseline save` could have written: markup is none."""
    try:
        return checked_identifier("the name", name)
    except UsageError as error:
        raise ValueError(str(error)) from error


_Name = Annotated[str, AfterValidator(_identifier)]


class _Document(BaseModel):
    name: _Name
    sweep: _Name
    saved_utc: str
    hardware: HardwareKey
    cells: Annotated[list[_CellDocument], Field(min_length=1)]


@dataclass(frozen=True)
class Baseline:
    """Cells of one kind of hardware under a name."""

    name: str
    sweep: str
    saved_utc: str
    cells: tuple[CellSamples, ...]

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
            "cells": [_CellDocument.of(cell).model_dump(exclude_none=True) for cell in self.cells],
        }
        text = json.dumps(document, indent=1, ensure_ascii=False)
        return _NUMBER_LIST.sub(lambda m: f"[{' '.join(m.group(1).split())}]", text) + "\n"


def make_baseline(name: str, sweep: str, saved_utc: str, cells: Sequence[CellSamples]) -> Baseline:
    """A baseline of the finished cells of a sweep.

    Raises:
        NothingMeasuredError: no cell.
        NotComparableError: the cells were measured on different hardware.
    """
    if not cells:
        raise NothingMeasuredError(f"{sweep} has no finished run: there is nothing to save")
    kinds = {cell.hardware for cell in cells}
    if len(kinds) > 1:
        machines = "; ".join(sorted(kind.describe() for kind in kinds))
        raise NotComparableError(f"{sweep} was measured on different hardware: {machines}")
    thinned = (
        {name: tuple(map(_thinned, curves)) for name, curves in cell.curves.items()}
        for cell in cells
    )
    kept = (replace(cell, curves=curves) for cell, curves in zip(cells, thinned, strict=True))
    return Baseline(name, sweep, saved_utc, tuple(kept))


def _thinned(curve: Curve) -> Curve:
    last = len(curve.steps) - 1
    if last < CURVE_POINTS:
        return curve
    kept = sorted({round(i * last / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)})
    values = tuple(curve.values[i] for i in kept)
    return Curve(tuple(curve.steps[i] for i in kept), values, curve.digest)


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
        read = _Document.model_validate(document)
    except ValidationError as error:
        raise UsageError(f"{source} is damaged ({first_problem(error)}); save it again") from error
    cells = tuple(cell.samples(read.hardware) for cell in read.cells)
    return Baseline(read.name, read.sweep, read.saved_utc, cells)


def promote(candidate: Baseline, current: Baseline | None, name: str) -> Baseline:
    """`candidate` under `name`, in the place of `current`.

    Raises:
        NotComparableError: other hardware, configurations or schema than `current`.
    """
    if current is not None and (reason := _differs(candidate, current)):
        raise NotComparableError(
            f"{candidate.name} cannot take the place of {name}: {reason}; give it another name"
        )
    return replace(candidate, name=name)


def _differs(candidate: Baseline, current: Baseline) -> str:
    ours, theirs = candidate.hardware, current.hardware
    if ours != theirs:
        return f"hardware differs: {ours.describe()} and {theirs.describe()}"
    kept = {(cell.config_hash, cell.schema_version) for cell in candidate.cells}
    missing = [c.name for c in current.cells if (c.config_hash, c.schema_version) not in kept]
    if missing:
        return f"configurations differ: {', '.join(missing)} is not in {candidate.name}"
    return ""
