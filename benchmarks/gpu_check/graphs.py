"""Part `graphs`: whole iterations captured as CUDA graphs."""

from __future__ import annotations

from benchmarks.gpu_check.record import Device, Findings


def check(device: Device) -> Findings:  # noqa: ARG001 - every part is asked alike
    """Run the part."""
    findings = Findings()
    findings.note("cuda_graph", "not_built", "the core refuses cuda_graph_mode")
    return findings
