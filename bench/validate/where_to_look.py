"""From a finding to where its cause is likely: the collective concerned, and files of the core."""

from __future__ import annotations

from bench.validate.case_evidence import CaseEvidence
from bench.verdict import Finding

_GATHERS = ("all_gather", "broadcast")
_REDUCTIONS = ("reduce_scatter", "all_reduce")
_READING = (_GATHERS, "runtime/param_pipeline.py, runtime/weight_buffers.py, comm/")

#: By check: the operations that bring it about, and files and rooms of mfsdp_core.
LOOK_AT: dict[str, tuple[tuple[str, ...], str]] = {
    "initial weights": (_GATHERS[1:], "shard/, runtime/meta_init.py, state/loading.py"),
    "computed weights": _READING,
    "losses": _READING,
    "gradients": (_REDUCTIONS, "runtime/grad_pipeline.py, runtime/gradient_buffers.py, comm/"),
    "norm and clipping": ((), "state/grad_norm.py"),
    "optimizer step": ((), "state/optimizer.py, precision/transformer_engine.py"),
    "replicas": (_GATHERS, "runtime/equal_weights.py, runtime/axis_reduction.py, comm/"),
    "gathered weights": ((), "shard/gather_hooks.py, shard/uneven_shard.py"),
    "exported weights": ((), "state/plain_export.py, state/module_copy.py, uneven_dtensor.py"),
    "strict loading": ((), "state/loading.py"),
    "stream order": ((), "streams.py, runtime/"),
    "wire dtypes": ((), "precision/, comm/"),
    "gather precision": (_GATHERS, "precision/"),
    "wire order": ((), "runtime/reduction_queue.py, runtime/gather_order.py"),
    "wire accounts": ((), "comm/wire_log.py"),
    "gather group": (_GATHERS, "comm/mesh.py"),
    "collective counts": ((), "plan/strategy.py, runtime/"),
    "buffers": ((), "plan/layout.py, plan/grouping.py"),
    "memory at rest": ((), "memory/, plan/memory_model.py"),
    "no growth": ((), "memory/, runtime/"),
    "freed after deletion": ((), "memory/, runtime/"),
}


def where_to_look(evidence: CaseEvidence, check: str, finding: Finding) -> str:
    """As `reduce_scatter of blocks.0/0 over inner; mfsdp_core/runtime/grad_pipeline.py`."""
    operations, files = LOOK_AT.get(check, ((), "shard/"))
    bucket = evidence.bucket_of(finding.parameter) if finding.parameter else None
    step, rank = (finding.step or 1) - 1, finding.rank or 0
    steps = evidence.seen[rank].steps
    log = steps[step].log if 0 <= step < len(steps) else []
    sent = {
        f"{entry.operation} of {entry.bucket} over {entry.group}": None
        for entry in log
        if entry.bucket == bucket and entry.operation in operations
    }
    of_core = evidence.case.engine == "mfsdp"
    rooms = [", ".join(f"mfsdp_core/{file}" for file in files.split(", "))] if of_core else []
    return "; ".join([*sent, *rooms])
