"""What the user asks for in one run: frozen, validated, torch-free.

`RunSpec` is the request (fields may be None, meaning "the engine's default"). `bench.resolve` turns
it into a `ResolvedRun`, in which nothing is left open, and which is hashed to name the run.
"""

from __future__ import annotations

from bench.spec.engine import EngineSpec
from bench.spec.model import HybridShape, ModelShape, ModelSpec
from bench.spec.names import (
    BLOCK_LETTERS,
    POOLS,
    AllocatorName,
    DataKind,
    DeviceType,
    DtypeName,
    EngineName,
    Frozen,
    NcclRecord,
    OuterStrategyName,
    Profile,
    Recompute,
    StrategyName,
    TransportName,
)
from bench.spec.run import (
    DataSpec,
    DtypeSpec,
    LaunchSpec,
    MeasureSpec,
    ResolvedDtypes,
    ResolvedRun,
    RunSpec,
    TrainSpec,
)

__all__ = [
    "BLOCK_LETTERS",
    "POOLS",
    "AllocatorName",
    "DataKind",
    "DataSpec",
    "DeviceType",
    "DtypeName",
    "DtypeSpec",
    "EngineName",
    "EngineSpec",
    "Frozen",
    "HybridShape",
    "LaunchSpec",
    "MeasureSpec",
    "ModelShape",
    "ModelSpec",
    "NcclRecord",
    "OuterStrategyName",
    "Profile",
    "Recompute",
    "ResolvedDtypes",
    "ResolvedRun",
    "RunSpec",
    "StrategyName",
    "TrainSpec",
    "TransportName",
]
