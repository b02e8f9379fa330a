"""Rules about NCCL user buffers and the pools they live in (harness.md section 0).

A user buffer is registered once, by address, so the memory behind it must never move: that takes a
pool whose slots exist from the start, used one after the other (double buffering).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.resolve.engine_choice import core_switches
from bench.resolve.machine import Machine
from bench.spec import POOLS, LaunchSpec, MfsdpSettings, ResolvedRun

_POOLS = " or ".join(POOLS)


def user_buffers(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """What `nccl_ub` needs of the device and of the switches beside it."""
    core, device = core_switches(run.engine), run.launch.device
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
    asked = _changed(launch, LaunchSpec(), "copy_engine", "nvls", "collnet")
    if asked and launch.device != "cuda":
        yield (
            "nccl-settings-need-cuda",
            f"launch.{' and launch.'.join(asked)} speak to NCCL; found device {launch.device}: use"
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
    core, defaults = core_switches(run.engine), MfsdpSettings()
    has_slots = core.allocator in POOLS
    if not has_slots and core.pool_slots != defaults.pool_slots:
        yield (
            "pool-slots-need-pool",
            f"pool_slots={core.pool_slots} counts the slots of a pool; found allocator"
            f" {core.allocator}: use {_POOLS}",
        )
    wants_slots = _changed(core, defaults, "double_buffer", "persistent_fallback")
    if not has_slots and wants_slots:
        yield (
            "double-buffer-needs-pool",
            f"{' and '.join(wants_slots)} is about the slots of a pool; found allocator"
            f" {core.allocator}: use {_POOLS}",
        )
    asked = _changed(core, defaults, "symmetric_registration", "manual_registration")
    if asked and not core.nccl_ub:
        yield (
            "registration-needs-nccl-ub",
            f"{' and '.join(asked)} is about NCCL user buffers: set nccl_ub to true, or leave it"
            " out",
        )


def _changed(found: Any, defaults: Any, *names: str) -> list[str]:
    pairs = ((name, getattr(found, name)) for name in names)
    return [f"{name}={value}" for name, value in pairs if value != getattr(defaults, name)]
