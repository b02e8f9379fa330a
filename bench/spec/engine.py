"""The engine of a run and its settings."""

from __future__ import annotations

from pydantic import Field

from bench.spec.names import (
    AllocatorName,
    EngineName,
    Frozen,
    OuterStrategyName,
    StrategyName,
    TransportName,
)


class EngineSpec(Frozen):
    """The implementation under test and its switches. `strategy` None: the engine's default.

    fine_grained_gather: gather module by module; None: by the rule of
    `mfsdp_core.plan.fine_grained`.
    """

    name: EngineName = "mfsdp"
    strategy: StrategyName | None = None
    outer_strategy: OuterStrategyName = "no_shard"
    outer_size: int = Field(default=1, ge=1)
    allocator: AllocatorName = "storage_resize"
    overlap_param_gather: bool = True
    overlap_grad_reduce: bool = True
    nccl_ub: bool = False
    double_buffer: bool = False
    average_in_collective: bool = False
    transport: TransportName = "auto"
    decoupled_grad: bool = False
    separate_gather_group: bool = False
    pool_slots: int = Field(default=2, ge=2)
    fine_grained_gather: bool | None = None
