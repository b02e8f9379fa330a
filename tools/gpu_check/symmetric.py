"""Part `symmetric`: buffers registered with NCCL, and the losses without registration."""

from __future__ import annotations

from typing import Any

from tools.gpu_check.record import Device, PartFindings
from tools.gpu_check.training import note_ranks, rank_count, ranks, run, small_run

_POOLED: dict[str, Any] = {
    "name": "mfsdp",
    "strategy": "optim_grads_params",
    "allocator": "fixed_pool",
    "double_buffer": True,
    "transport": "native",
}
_EXACT_RANKS, _CLOSE = 2, 1e-3


def check(device: Device) -> PartFindings:
    """Run the part."""
    findings = PartFindings()
    note_ranks(device, findings)
    with ranks(device, rank_count(device)) as workers:
        plain = run(workers, small_run(device, _POOLED), findings, "without registration")
        spec = small_run(device, _POOLED | {"nccl_ub": True})
        found = run(workers, spec, findings, "nccl_ub")
        if plain is None or found is None:
            return findings
        compare(plain[0].losses, found[0].losses, rank_count(device), findings)
    return findings


def compare(plain: list[float], found: list[float], ranks: int, findings: PartFindings) -> None:
    """Bit for bit where every sum has two terms; kernels add up more in orders of their own."""
    exact, findings.on_one_rank = ranks <= _EXACT_RANKS, ranks == 1
    worst = max(abs(a - b) / abs(a) for a, b in zip(plain, found, strict=True))
    holds = worst <= (0.0 if exact else _CLOSE)
    findings.expect("nccl_ub", holds, f"losses differ by {worst:.1e} at most, on {ranks} ranks")
