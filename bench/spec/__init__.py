"""What the user asks for in one run: frozen, validated, torch-free.

`RunSpec` is the request (fields may be None, meaning "the engine's default"). `bench.resolve` turns
it into a `ResolvedRun`, in which nothing is left open, and which is hashed to name the run.
"""

from __future__ import annotations

from bench.spec.engine import EngineSpec
from bench.spec.engine_table import (
    SHARED_SETTINGS,
    DtypePolicies,
    EngineRow,
    EngineSettings,
    MegatronFsdpSettings,
    MegatronSwitches,
    MfsdpSettings,
    engine_names,
    find_engine,
    is_import_path,
    known_engine,
    own_settings,
)
from bench.spec.model import (
    TENSOR_PARALLEL_DIMS,
    HybridShape,
    LinearLayers,
    ModelShape,
    ModelSpec,
    RopeScaling,
)
from bench.spec.names import (
    BLOCK_LETTERS,
    DEFAULT_TRANSPORT,
    HYBRID_NAMES,
    POOLS,
    PREDICTION,
    SHARDED,
    STRATEGIES,
    AllocatorName,
    DeviceType,
    DtypeName,
    FrontName,
    Frozen,
    GatherPrecisionName,
    OuterStrategyName,
    Part,
    Profile,
    RecipeName,
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
