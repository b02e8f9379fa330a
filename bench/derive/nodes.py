"""On which nodes a run was made: by the names that Slurm gives them, or a file of hosts."""

from __future__ import annotations

from collections.abc import Mapping

from bench.record import RunRecord


def nodes_of(record: RunRecord) -> frozenset[str]:
    """As the ranks say; empty for a run on one machine that is no node of a cluster."""
    variables, runtime = (record.environment.get(name) for name in ("variables", "runtime"))
    of_job = isinstance(variables, Mapping) and "SLURM_JOB_ID" in variables
    if not of_job and record.resolved.launch.nodes == 1:
        return frozenset()
    proofs = runtime.get("code_proof") if isinstance(runtime, Mapping) else None
    if not isinstance(proofs, Mapping):
        return frozenset()
    hosts = (proof.get("host") for proof in proofs.values() if isinstance(proof, Mapping))
    return frozenset(str(host) for host in hosts if host)
