"""Rules about the core's switches: NCCL user buffers, the pools they live in, CUDA graphs.

A user buffer is registered once, by address, so the memory behind it must never move: that takes a
pool whose slots exist from the start, used one after the other (double buffering).
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.resolve.engine_choice import changed_settings, core_switches, megatron_switches
from bench.resolve.machine import Machine
from bench.spec import POOLS, LaunchSpec, MfsdpSettings, ResolvedRun

_POOLS = " or ".join(POOLS)


def user_buffers(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """What `nccl_ub` needs of the device and of other switches."""
    core, device = megatron_switches(run.engine), run.launch.device
    if not core.nccl_ub:
        return
    if device != "cuda":
        yield (
            "nccl-ub-needs-cuda",
            f"nccl_ub registers buffers with NCCL; found device {device}: use cuda",
        )
    if core.average_in_collective:
        yield (
            "nccl-ub-needs-sum",
            "NCCL's symmetric reductions have no average: nccl_ub needs"
            " average_in_collective=False",
        )
    if not (core.double_buffer and core.allocator in POOLS):
        yield (
            "nccl-ub-needs-pool",
            "nccl_ub registers buffers by address and needs double_buffer=True with an allocator"
            f" that never moves them ({_POOLS}); found double_buffer={core.double_buffer},"
            f" allocator={core.allocator}",
        )


def nccl_settings(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """They are NCCL's, and a setting that nobody reads would mislabel a cell."""
    launch, setting = run.launch, run.engine.setting
    named = changed_settings(launch, LaunchSpec(), "copy_engine", "nvls", "collnet")
    if named and launch.device != "cuda":
        yield (
            "nccl-settings-need-cuda",
            f"launch.{' and launch.'.join(named)} speak to NCCL; found device {launch.device}: use"
            " cuda",
        )
    # Gathers of what does not lie in symmetric windows stay kernels.
    windows = setting("nccl_ub") and setting("symmetric_registration")
    if launch.copy_engine and not windows:
        yield (
            "copy-engine-needs-windows",
            "launch.copy_engine gathers what is registered as symmetric windows: use engine mfsdp"
            " with nccl_ub=true and symmetric_registration=true, or leave it out",
        )
    if launch.nvls == "on" and launch.ranks_per_device > 1:
        yield (
            "nvls-needs-devices-of-their-own",
            f"launch.nvls=on with ranks_per_device={launch.ranks_per_device}: NCCL does not start"
            " with NVLS where ranks share a device; leave nvls at its default",
        )


def pools(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """Settings that say how a pool is used, or how its memory is registered."""
    core, defaults = megatron_switches(run.engine), MfsdpSettings()
    has_slots, slots = core.allocator in POOLS, core_switches(run.engine).pool_slots
    if not has_slots and slots != defaults.pool_slots:
        yield (
            "pool-slots-need-pool",
            f"pool_slots={slots} counts the slots of a pool; found allocator"
            f" {core.allocator}: use {_POOLS}",
        )
    wants_slots = changed_settings(core, defaults, "double_buffer", "persistent_fallback")
    if not has_slots and wants_slots:
        yield (
            "double-buffer-needs-pool",
            f"{' and '.join(wants_slots)} is about the slots of a pool; found allocator"
            f" {core.allocator}: use {_POOLS}",
        )
    named = changed_settings(core, defaults, "symmetric_registration", "manual_registration")
    if named and not core.nccl_ub:
        yield (
            "registration-needs-nccl-ub",
            f"{' and '.join(named)} is about NCCL user buffers: set nccl_ub to true, or leave it"
            " out",
        )


def offload(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """What wants main weights or gradients on the device."""
    core, linear = core_switches(run.engine), run.linear
    problems = {
        "nccl_ub=True": core.nccl_ub,
        "cuda_graph=True": core.cuda_graph,
        "decoupled_grad=True": core.decoupled_grad,
        f"recipe={core.recipe}": core.recipe != "none",
        f"train.optimizer={run.train.optimizer}": run.train.optimizer == "fused_adam",
        "model.quantised_weights": linear.quantised_weights,
    }
    wrong = [what for what, holds in problems.items() if holds]
    if run.engine.setting("offload") and wrong:
        yield (
            "offload-leaves-the-device",
            "offload keeps main weights and gradients in host memory, and the device needs them for"
            f" {' and '.join(wrong)}: leave one out",
        )


#: Calls before the first replay: see `mfsdp_core.captured_step`.
_WARM_UP_STEPS = 5


def graphs(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """CUDA, memory that stays where it is, and a host that has no part in the step."""
    core, device = core_switches(run.engine), run.launch.device
    if not core.cuda_graph:
        return
    # A CPU has no graphs.
    if device != "cuda":
        yield (
            "cuda-graph-needs-cuda",
            f"cuda_graph captures CUDA graphs; found device {device}: use cuda",
        )
    if not (core.double_buffer and core.allocator in POOLS):
        yield (
            "cuda-graph-needs-fixed-memory",
            "cuda_graph repeats addresses and needs double_buffer=True with an allocator that never"
            f" moves buffers ({' or '.join(POOLS)}); found double_buffer={core.double_buffer},"
            f" allocator={core.allocator}",
        )
    elif core.nccl_ub and (core.symmetric_registration or core.manual_registration):
        yield (
            "cuda-graph-needs-fixed-memory",
            "cuda_graph with nccl_ub needs symmetric_registration=false (graphs of symmetric"
            " kernels are known to be unreliable, NVIDIA/Megatron-LM#6154) and"
            " manual_registration=false (memory is registered before the capture)",
        )
    if reason := _of_the_host(run):
        yield "cuda-graph-keeps-the-host-out", f"cuda_graph cannot have {', nor '.join(reason)}"
    if reason := _watched(run):
        yield (
            "cuda-graph-hides-operations",
            f"{' and '.join(reason)} cannot see into a replayed graph: measure without cuda_graph,"
            " which enqueues the same",
        )
    elif run.train.steps <= _WARM_UP_STEPS:
        yield (
            "cuda-graph-hides-operations",
            f"cuda_graph captures step {_WARM_UP_STEPS}, and the run has {run.train.steps} steps:"
            " nothing would be replayed",
        )


def _of_the_host(run: ResolvedRun) -> list[str]:
    """What the host reads or computes within a step, a graph would repeat from its capture."""
    core = core_switches(run.engine)
    problems = {
        "nan_check=true (reads every gradient on the host)": core.nan_check,
        f"transport={core.transport} (messages from the host)": core.transport == "point_to_point",
        f"recipe={core.recipe} (never captured)": core.recipe != "none",
        "matrices=whole (never captured)": core.matrices == "whole",
        f"train.optimizer={run.train.optimizer} (its numbers are the host's; adamw can keep them"
        " on the device)": run.train.optimizer != "adamw",
        "experts whose token counts the host reads (they stay on the device with dtypes.compute"
        " bf16, expert_parallel 1, and widths in multiples of 8)": _counts_on_host(run),
        "a model of the user's own (nobody knows what it reads)": run.shape is None,
    }
    return [what for what, holds in problems.items() if holds]


def _counts_on_host(run: ResolvedRun) -> bool:
    """Torch's grouped product has a kernel for BF16 on CUDA, and reads the counts without one."""
    hybrid = None if run.shape is None else run.shape.hybrid
    if run.shape is None or hybrid is None or "E" not in hybrid.pattern:
        return False
    widths = (run.shape.hidden, hybrid.expert_hidden)
    is_grouped = run.dtypes.compute == "bf16" and not any(width % 8 for width in widths)
    return not is_grouped or run.engine.expert_parallel > 1


def _watched(run: ResolvedRun) -> list[str]:
    """A replay does nothing that a profile, a count or NCCL's log on the host could see."""
    measure = run.measure
    problems = {
        "measure.counts": measure.counts,
        f"measure.profile={measure.profile}": measure.profile != "none",
        "measure.nvtx": measure.nvtx,
        f"measure.nccl={measure.nccl}": measure.nccl != "none",
    }
    return [what for what, holds in problems.items() if holds]
