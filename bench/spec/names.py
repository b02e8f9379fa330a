"""Words that settings are written in, and the base of everything that holds settings."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

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
#: Interfaces of the core: `fully_shard_model`, and `fully_shard` of FSDP2.
FrontName = Literal["megatron", "fsdp2"]
TransportName = Literal["auto", "native", "point_to_point"]
#: As `mfsdp_core.plan.options` has it; a test compares the two.
DEFAULT_TRANSPORT: TransportName = "auto"
#: Recipes of quantised weights; `mfsdp_core.plan.recipes` says what they are.
RecipeName = Literal["none", "delayed", "current", "block", "mxfp8"]
GatherPrecisionName = Literal["recipe", "compute"]
Profile = Literal["none", "memory", "torch"]
#: Ways to split a model over ranks besides its data.
ParallelismName = Literal["tensor_parallel", "expert_parallel"]
#: Who computes the projections of a Llama.
LinearName = Literal["torch", "transformer_engine"]
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

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        """With the texts, which are read from the source only when a schema is wanted.

        pydantic's own `use_attribute_docstrings` reads them when the class is made: a fifth of
        what importing the command line takes, in every rank too.
        """
        schema: dict[str, Any] = handler(core)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for base in cls.__mro__:
            texts = _texts_below_fields(base) if issubclass(base, Frozen) else {}
            for name in texts.keys() & properties.keys():
                properties[name].setdefault("description", texts[name])
        return schema


def _texts_below_fields(model: type) -> dict[str, str]:
    import ast
    import inspect
    import textwrap

    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, below in pairwise(tree.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = inspect.cleandoc(text)
    return docs
