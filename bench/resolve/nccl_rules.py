"""Rules about NCCL user buffers and the pools they live in (harness.md section 0).

A user buffer is registered once, by address, so the memory behind it must never move: that takes a
pool whose slots exist from the start, used in turns (double buffering).
"""

from __future__ import annotations

from bench.resolve.machine import Machine
from bench.spec import POOLS, EngineSpec, ResolvedRun


def nccl_ub_needs_cuda(run: ResolvedRun, _machine: Machine) -> str | None:
    """User buffers are NCCL's, and NCCL is CUDA's."""
    if not run.engine.nccl_ub or run.launch.device == "cuda":
        return None
    return f"nccl_ub registers buffers with NCCL; found device {run.launch.device}: use cuda"


def nccl_ub_needs_sum(run: ResolvedRun, _machine: Machine) -> str | None:
    """NCCL's symmetric reductions sum; they do not average."""
    if not (run.engine.nccl_ub and run.engine.average_in_collective):
        return None
    return "NCCL's symmetric reductions have no average: nccl_ub needs average_in_collective=False"


def nccl_ub_needs_pool(run: ResolvedRun, _machine: Machine) -> str | None:
    """Registration is by address, so buffers must stay where they are."""
    engine = run.engine
    if not engine.nccl_ub or (engine.double_buffer and engine.allocator in POOLS):
        return None
    return (
        "nccl_ub registers buffers by address and needs double_buffer=True with an allocator that"
        f" never moves them ({' or '.join(POOLS)}); found double_buffer={engine.double_buffer},"
        f" allocator={engine.allocator}"
    )


def pool_slots_need_pool(run: ResolvedRun, _machine: Machine) -> str | None:
    """Only pools have slots."""
    engine = run.engine
    if engine.allocator in POOLS or engine.pool_slots == EngineSpec().pool_slots:
        return None
    return (
        f"pool_slots={engine.pool_slots} counts the slots of a pool; found allocator"
        f" {engine.allocator}: use {' or '.join(POOLS)}"
    )


def double_buffer_needs_pool(run: ResolvedRun, _machine: Machine) -> str | None:
    """Double buffering says how a pool is used; other allocators have no slots."""
    engine = run.engine
    if not engine.double_buffer or engine.allocator in POOLS:
        return None
    return (
        f"double_buffer=True takes turns on the slots of a pool; found allocator"
        f" {engine.allocator}: use {' or '.join(POOLS)}"
    )
