"""Rules about `engine.cuda_graph`: what a step that is captured once and replayed cannot have."""

from __future__ import annotations

from bench.resolve.engine_rules import core_settings
from bench.resolve.machine import Machine
from bench.spec import POOLS, ResolvedRun

#: Calls before the first replay: see `mfsdp_core.captured_step`.
_WARM_UP_STEPS = 5


def cuda_graph_needs_cuda(run: ResolvedRun, _machine: Machine) -> str | None:
    """A CPU has no graphs; `make gpu-check DEVICE=cpu PARTS=graphs` checks a step without one."""
    if not _asked(run) or run.launch.device == "cuda":
        return None
    return f"cuda_graph captures CUDA graphs; found device {run.launch.device}: use cuda"


def cuda_graph_needs_fixed_memory(run: ResolvedRun, _machine: Machine) -> str | None:
    """A graph repeats addresses, so buffers must stay where they are."""
    settings = core_settings(run.engine)
    if settings is None or not settings.cuda_graph:
        return None
    if not (settings.double_buffer and settings.allocator in POOLS):
        return (
            "cuda_graph repeats addresses and needs double_buffer=True with an allocator that never"
            f" moves buffers ({' or '.join(POOLS)}); found double_buffer={settings.double_buffer},"
            f" allocator={settings.allocator}"
        )
    if settings.nccl_ub and (settings.symmetric_registration or settings.manual_registration):
        return (
            "cuda_graph with nccl_ub needs symmetric_registration=false (graphs of symmetric"
            " kernels are known to be unreliable, NVIDIA/Megatron-LM#6154) and"
            " manual_registration=false (memory is registered before the capture)"
        )
    return None


def cuda_graph_keeps_the_host_out(run: ResolvedRun, _machine: Machine) -> str | None:
    """What the host reads or computes within a step, a graph would repeat from its capture."""
    settings = core_settings(run.engine)
    if settings is None or not settings.cuda_graph:
        return None
    found = {
        "nan_check=true (reads every gradient on the host)": settings.nan_check,
        f"transport={settings.transport} (messages from the host)": (
            settings.transport == "point_to_point"
        ),
        f"recipe={settings.recipe} (never captured)": settings.recipe != "none",
        f"train.optimizer={run.train.optimizer} (its numbers are the host's; adamw can keep them"
        " on the device)": run.train.optimizer != "adamw",
        "experts whose token counts the host reads (they stay on the device with dtypes.compute"
        " bf16, expert_parallel 1, and widths in multiples of 8)": _counts_on_host(run),
        "a model of the user's own (nobody knows what it reads)": run.shape is None,
    }
    named = [what for what, holds in found.items() if holds]
    return f"cuda_graph cannot have {', nor '.join(named)}" if named else None


def _counts_on_host(run: ResolvedRun) -> bool:
    """Torch's grouped product has a kernel for BF16 on CUDA, and reads the counts without one."""
    hybrid = None if run.shape is None else run.shape.hybrid
    if run.shape is None or hybrid is None or "E" not in hybrid.pattern:
        return False
    widths = (run.shape.hidden, hybrid.expert_hidden)
    is_grouped = run.dtypes.compute == "bf16" and not any(width % 8 for width in widths)
    return not is_grouped or run.engine.expert_parallel > 1


def cuda_graph_hides_operations(run: ResolvedRun, _machine: Machine) -> str | None:
    """A replay does nothing that a profile, a count or NCCL's log on the host could see."""
    if not _asked(run):
        return None
    measure = run.measure
    found = {
        "measure.counts": measure.counts,
        "measure.host_time": measure.host_time,
        f"measure.profile={measure.profile}": measure.profile != "none",
        f"measure.nccl={measure.nccl}": measure.nccl != "none",
    }
    named = [what for what, holds in found.items() if holds]
    if named:
        return (
            f"{' and '.join(named)} cannot see into a replayed graph: measure without cuda_graph,"
            " which enqueues the same"
        )
    if run.train.steps <= _WARM_UP_STEPS:
        return (
            f"cuda_graph captures step {_WARM_UP_STEPS}, and the run has {run.train.steps} steps:"
            " nothing would be replayed"
        )
    return None


def _asked(run: ResolvedRun) -> bool:
    settings = core_settings(run.engine)
    return settings is not None and settings.cuda_graph
