"""Part `symmetric`: buffers registered with NCCL; the same losses as without registration."""

from __future__ import annotations

from typing import Any

from tools.gpu_check.record import Device, Findings
from tools.gpu_check.training import note_ranks, rank_count, ranks, run, small_run

_POOLED: dict[str, Any] = {
    "name": "mfsdp",
    "strategy": "optim_grads_params",
    "allocator": "fixed_pool",
    "double_buffer": True,
    "transport": "native",
}


def check(device: Device) -> Findings:
    """Run the part."""
    findings = Findings()
    note_ranks(device, findings)
    with ranks(device, rank_count(device)) as workers:
        plain = run(workers, small_run(device, _POOLED), findings, "without registration")
        spec = small_run(device, _POOLED | {"nccl_ub": True})
        found = run(workers, spec, findings, "nccl_ub")
        if plain is None or found is None:
            return findings
        same = plain[0].losses == found[0].losses
        findings.expect("nccl_ub", same, "losses are bit-equal" if same else "losses differ")
    return findings
