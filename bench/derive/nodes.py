"""On which nodes of a cluster a run was made, by the names that Slurm gives them."""

from __future__ import annotations

from collections.abc import Mapping

from bench.record import RunRecord


def nodes_of(record: RunRecord) -> frozenset[str]:
    """As the ranks say; empty for a run that no job of a cluster made."""
    variables, runtime = (record.environment.get(name) for name in ("variables", "runtime"))
    if not isinstance(variables, Mapping) or "SLURM_JOB_ID" not in variables:
        return frozenset()
    proofs = runtime.get("code_proof") if isinstance(runtime, Mapping) else None
    if not isinstance(proofs, Mapping):
        return frozenset()
    hosts = (proof.get("host") for proof in proofs.values() if isinstance(proof, Mapping))
    return frozenset(str(host) for host in hosts if host)
