"""Part `memory`: after a step what is held is what was held before it, for every allocator."""

from __future__ import annotations

from typing import Any

from bench.spec.names import AllocatorName
from tools.gpu_check.record import Device, PartFindings
from tools.gpu_check.trained import Trained
from tools.gpu_check.training import note_ranks, rank_count, ranks, run, small_run

_STEPS = 8
_SETTLED = 3
#: Small blocks of torch and of libraries come and go.
_SLACK_BYTES = 1 << 20
_ALLOCATORS: tuple[AllocatorName, ...] = ("temporary", "storage_resize", "fixed_pool", "max_pool")


def check(device: Device) -> PartFindings:
    """Run the part."""
    findings = PartFindings()
    note_ranks(device, findings)
    with ranks(device, rank_count(device)) as workers:
        for allocator in _ALLOCATORS:
            engine = {"name": "mfsdp", "strategy": "optim_grads_params", "allocator": allocator}
            engine["double_buffer"] = allocator.endswith("pool")  # type: ignore[assignment]
            spec = small_run(device, engine, steps=_STEPS)
            found = run(workers, spec, findings, allocator)
            if found is not None:
                judge(allocator, found[0], findings)
    return findings


def judge(name: str, trained: Trained, findings: PartFindings) -> None:
    """Bytes at rest stay; the device's allocator never had to give up and try again."""
    series: dict[str, list[int] | None] = {
        "ledger": trained.resting_bytes,
        "allocated": trained.allocated_bytes,
        "reserved minus allocated": _difference(trained.reserved_bytes, trained.allocated_bytes),
    }
    measured: dict[str, Any] = {
        "peak_allocated_bytes": trained.peak_allocated_bytes,
        "allocation_retries": trained.allocation_retries,
    }
    for what, values in series.items():
        if values is None:
            continue
        settled = values[_SETTLED:]
        drift = max(settled) - settled[0]
        measured[what] = {"bytes": settled[-1], "drift_bytes": drift}
        findings.expect(f"{name}: {what} at rest", drift <= _SLACK_BYTES, f"grew by {drift} bytes")
    if trained.allocation_retries is not None:
        said = f"{trained.allocation_retries} retries of the device's allocator"
        findings.expect(f"{name}: no retries", trained.allocation_retries == 0, said)
    findings.measurements[name] = measured


def _difference(a: list[int] | None, b: list[int] | None) -> list[int] | None:
    if a is None or b is None:
        return None
    return [one - other for one, other in zip(a, b, strict=True)]
