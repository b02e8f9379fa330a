"""Rules about NCCL user buffers and the pools they live in (harness.md section 0).

A user buffer is registered once, by address, so the memory behind it must never move: that takes a
pool whose slots exist from the start, used one after the other (double buffering).
"""

from __future__ import annotations

from bench.resolve.engine_rules import core_settings
from bench.resolve.machine import Machine
from bench.spec import POOLS, LaunchSpec, MfsdpSettings, ResolvedRun


def nccl_ub_needs_cuda(run: ResolvedRun, _machine: Machine) -> str | None:
    """User buffers are NCCL's, and NCCL is CUDA's."""
    settings = core_settings(run.engine)
    if settings is None or not settings.nccl_ub or run.launch.device == "cuda":
        return None
    return f"nccl_ub registers buffers with NCCL; found device {run.launch.device}: use cuda"


def nccl_ub_needs_sum(run: ResolvedRun, _machine: Machine) -> str | None:
    """NCCL's symmetric reductions sum; they do not average."""
    settings = core_settings(run.engine)
    if settings is None or not (settings.nccl_ub and settings.average_in_collective):
        return None
    return "NCCL's symmetric reductions have no average: nccl_ub needs average_in_collective=False"


def registration_needs_nccl_ub(run: ResolvedRun, _machine: Machine) -> str | None:
    """How to register says nothing where nothing is registered."""
    engine, defaults = core_settings(run.engine), MfsdpSettings()
    if engine is None or engine.nccl_ub:
        return None
    names = ("symmetric_registration", "manual_registration")
    asked = [
        f"{n}={getattr(engine, n)}" for n in names if getattr(engine, n) != getattr(defaults, n)
    ]
    if not asked:
        return None
    return f"{' and '.join(asked)} is about NCCL user buffers: set nccl_ub to true, or leave it out"


def nccl_ub_needs_pool(run: ResolvedRun, _machine: Machine) -> str | None:
    """Registration is by address, so buffers must stay where they are."""
    engine = core_settings(run.engine)
    if engine is None or not engine.nccl_ub or (engine.double_buffer and engine.allocator in POOLS):
        return None
    return (
        "nccl_ub registers buffers by address and needs double_buffer=True with an allocator that"
        f" never moves them ({' or '.join(POOLS)}); found double_buffer={engine.double_buffer},"
        f" allocator={engine.allocator}"
    )


def nccl_settings_need_cuda(run: ResolvedRun, _machine: Machine) -> str | None:
    """They are NCCL's, and a setting that nobody reads would mislabel a cell."""
    launch, defaults = run.launch, LaunchSpec()
    names = ("copy_engine", "nvls", "collnet")
    asked = [
        f"{n}={getattr(launch, n)}" for n in names if getattr(launch, n) != getattr(defaults, n)
    ]
    if not asked or launch.device == "cuda":
        return None
    return (
        f"launch.{' and launch.'.join(asked)} speak to NCCL; found device {launch.device}: use cuda"
    )


def copy_engine_needs_windows(run: ResolvedRun, _machine: Machine) -> str | None:
    """The copy engine gathers what lies in symmetric windows; other gathers stay kernels."""
    setting = run.engine.setting
    registered = setting("nccl_ub") and setting("symmetric_registration")
    registered = registered or setting("registration") == "symmetric"
    if not run.launch.copy_engine or registered:
        return None
    return (
        "launch.copy_engine gathers what is registered as symmetric windows: use engine mfsdp with"
        " nccl_ub=true and symmetric_registration=true (engine collective: registration=symmetric),"
        " or leave it out"
    )


def nvls_needs_devices_of_their_own(run: ResolvedRun, _machine: Machine) -> str | None:
    """NCCL fails to start with NVLS where ranks share a device."""
    if run.launch.nvls != "on" or run.launch.ranks_per_device == 1:
        return None
    return (
        f"launch.nvls=on with ranks_per_device={run.launch.ranks_per_device}: NCCL does not start"
        " with NVLS where ranks share a device; leave nvls at its default"
    )


def pool_slots_need_pool(run: ResolvedRun, _machine: Machine) -> str | None:
    """Only pools have slots."""
    engine = core_settings(run.engine)
    if engine is None or engine.allocator in POOLS:
        return None
    if engine.pool_slots == MfsdpSettings().pool_slots:
        return None
    return (
        f"pool_slots={engine.pool_slots} counts the slots of a pool; found allocator"
        f" {engine.allocator}: use {' or '.join(POOLS)}"
    )


def double_buffer_needs_pool(run: ResolvedRun, _machine: Machine) -> str | None:
    """Double buffering says how a pool is used; other allocators have no slots."""
    engine = core_settings(run.engine)
    if engine is None or not engine.double_buffer or engine.allocator in POOLS:
        return None
    return (
        f"double_buffer=True uses the slots of a pool one after the other; found allocator"
        f" {engine.allocator}: use {' or '.join(POOLS)}"
    )
