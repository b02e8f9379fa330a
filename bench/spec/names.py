"""Words that settings are written in, and the base of everything that holds settings."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, WithJsonSchema

DtypeName = Literal["fp64", "fp32", "bf16", "fp16"]
StrategyName = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
OuterStrategyName = Literal["no_shard", "optim"]
Part = Literal["optimizer", "gradients", "weights"]
#: What ranks share out among them, by strategy. The core has a table of its own, in
#: `mfsdp_core.plan.strategy`: a check that read that one would believe whatever it says.
SHARDED: Final[dict[StrategyName, frozenset[Part]]] = {
    "no_shard": frozenset(),
    "optim": frozenset({"optimizer"}),
    "optim_grads": frozenset({"optimizer", "gradients"}),
    "optim_grads_params": frozenset({"optimizer", "gradients", "weights"}),
}
STRATEGIES: Final[tuple[StrategyName, ...]] = tuple(SHARDED)
#: What sharding on two data-parallel axes is called, by the strategy of the outer one.
HYBRID_NAMES: dict[OuterStrategyName, str] = {"no_shard": "hsdp", "optim": "hfsdp"}
Recompute = Literal["none", "full", "selective"]
DataKind = Literal["text", "markov", "random"]
DeviceType = Literal["cpu", "cuda"]
AllocatorName = Literal["temporary", "storage_resize", "fixed_pool", "max_pool"]
#: Allocators whose slots exist from the start.
POOLS: tuple[AllocatorName, ...] = ("fixed_pool", "max_pool")
CollectiveName = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
#: Memory of torch's allocator, of NCCL's and registered with it, or registered as windows.
RegistrationName = Literal["plain", "registered", "symmetric"]
#: `same_host` is gone: records of runs until November 2026 have it, and a request is refused.
TransportName = Annotated[
    Literal["auto", "native", "point_to_point", "same_host"],
    WithJsonSchema({"enum": ["auto", "native", "point_to_point"], "type": "string"}),
]
#: What carries one collective by itself, whose engine chooses nothing.
CollectiveTransportName = Annotated[
    Literal["native", "point_to_point", "same_host"],
    WithJsonSchema({"enum": ["native", "point_to_point"], "type": "string"}),
]
#: As `mfsdp_core.plan.config` has it; a test compares the two.
DEFAULT_TRANSPORT: TransportName = "auto"
#: Recipes of quantised weights; `mfsdp_core.plan.recipes` says what they are.
RecipeName = Literal["none", "delayed", "current", "block", "mxfp8", "nvfp4"]
GatherPrecisionName = Literal["recipe", "compute"]
Profile = Literal["none", "memory", "torch"]
#: Ways to split a model over ranks beside its data.
ParallelismName = Literal["tensor_parallel", "expert_parallel"]
#: Who computes the projections of a Llama.
LinearName = Literal["torch", "torchao", "transformer_engine"]
NcclRecord = Literal["none", "evidence"]
Switch = Literal["default", "on", "off"]


BLOCK_LETTERS: Final = {
    "M": "Mamba-2",
    "*": "attention",
    "E": "experts",
    "-": "feed-forward",
    "/": "multi-token prediction",
}
"""Blocks of a hybrid (state space, attention, mixture of experts), in Nemotron-H's notation.

`/` begins a depth of multi-token prediction, made of the blocks behind it.
"""
PREDICTION: Final = "/"


class Frozen(BaseModel):
    """Immutable, and an unknown key is an error rather than a silent default. Numbers are finite.

    The text below a field describes it in JSON Schemas.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
