"""What a gate needs of one cell of one side, from records or from a baseline. Plain data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.derive.hardware import HardwareKey, hardware_key
from bench.record import RunRecord
from reports.comparisons.change import MemoryMetric
from reports.comparisons.parity import losses, tolerance_for
from reports.views.cells import Cell, Run

MEMORY_METRICS: tuple[MemoryMetric, ...] = ("device_peak", "ledger", "rss")


@dataclass(frozen=True)
class LossCurve:
    """Losses of one run by step. digest: SHA-256 of every loss, bit for bit.

    steps, values: all of them, or (in a baseline) some of them, the last included.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]
    digest: str

    @classmethod
    def of(cls, values: Sequence[float]) -> LossCurve:
        """The curve of losses of step 1, 2, ..."""
        text = "\n".join(float(value).hex() for value in values)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cls(tuple(range(1, len(values) + 1)), tuple(values), digest)


@dataclass(frozen=True)
class CellEvidence:
    """Runs of one configuration, one code, one kind of hardware.

    step_milliseconds: steady-state median by block, of runs whose time counts. memory: bytes by
    metric, wire_bytes: bytes per step of all ranks, curves: losses; one entry per finished run.
    loss_bound: relative difference that the dtypes explain. interleaved: the blocks were run in
    turn with the other arm's.
    """

    name: str
    slug: str
    config_hash: str
    schema_version: int
    hardware: HardwareKey
    code: str
    commit: str
    step_milliseconds: Mapping[int, float]
    tokens_per_step: float
    memory: Mapping[MemoryMetric, tuple[float, ...]]
    wire_bytes: tuple[float, ...]
    curves: tuple[LossCurve, ...]
    loss_bound: float
    interleaved: bool = False
    not_steady: int = 0


def cell_evidence(
    cell: Cell, runs: Sequence[Run] | None = None, *, interleaved: bool = False
) -> CellEvidence:
    """Evidence of `cell`, of its finished runs or of those in `runs` (at least one).

    Raises:
        ValueError: no finished run.
    """
    counted = list(cell.finished if runs is None else runs)
    if not counted:
        raise ValueError(f"{cell.name} has no finished run")
    record = counted[0].record
    git = record.environment.get("git")
    return CellEvidence(
        name=cell.name,
        slug=record.resolved.slug,
        config_hash=record.resolved.config_hash,
        schema_version=record.status.schema_version,
        hardware=hardware_key(record),
        code=record.status.code,
        commit=str(git.get("commit") or "") if isinstance(git, Mapping) else "",
        step_milliseconds={
            run.record.status.repeat: run.summary.step_milliseconds_median
            for run in counted
            if run.summary.step_milliseconds_median is not None
        },
        tokens_per_step=float(record.resolved.tokens_per_step),
        memory=_memory(counted),
        wire_bytes=_known(run.summary.wire_bytes_per_step for run in counted),
        curves=tuple(LossCurve.of(losses(run.record)) for run in counted),
        loss_bound=tolerance_for(record.resolved).bound,
        interleaved=interleaved,
        not_steady=sum(run.summary.step_milliseconds_median is None for run in counted),
    )


def _memory(runs: Sequence[Run]) -> dict[MemoryMetric, tuple[float, ...]]:
    found: dict[MemoryMetric, tuple[float, ...]] = {
        "device_peak": _known(run.summary.device_peak_bytes for run in runs),
        "ledger": _known(_ledger(run) for run in runs),
        "rss": _known(run.summary.rss_peak_bytes for run in runs),
    }
    return {metric: values for metric, values in found.items() if values}


def _ledger(run: Run) -> float | None:
    ledger = run.summary.memory_by_category_bytes
    return float(sum(ledger.values())) if ledger else None


def _known(values: object) -> tuple[float, ...]:
    return tuple(float(value) for value in values if value is not None)  # type: ignore[attr-defined]


def started(record: RunRecord) -> str:
    """When the run began, UTC."""
    return record.status.started_utc
