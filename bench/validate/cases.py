"""What is checked: a case is a toy model, a sharding, a dtype policy and a scenario on n ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from bench.spec import (
    DEFAULT_TRANSPORT,
    HYBRID_NAMES,
    POOLS,
    SHARDED,
    AllocatorName,
    DataSpec,
    DtypeName,
    EngineSpec,
    FrontName,
    LaunchSpec,
    MeasureSpec,
    ModelShape,
    OuterStrategyName,
    Part,
    RecipeName,
    ResolvedDtypes,
    ResolvedRun,
    StrategyName,
    TrainSpec,
    TransportName,
)
from bench.validate.program import Program

Policy = Literal["fp64", "fp32", "bf16", "bf16_wire", "bf16_sum"]
Scenario = Literal[
    "train",
    "unmarked",
    "again",
    "redirected",
    "equalised",
    "reloaded",
    "ahead",
    "exported",
]

#: compute, main weights, main gradients, wire.
POLICIES: dict[Policy, tuple[DtypeName, DtypeName, DtypeName, DtypeName]] = {
    "fp64": ("fp64", "fp64", "fp64", "fp64"),
    "fp32": ("fp32", "fp32", "fp32", "fp32"),
    "bf16": ("bf16", "fp32", "fp32", "bf16"),
    "bf16_wire": ("fp32", "fp32", "fp32", "bf16"),
    "bf16_sum": ("bf16", "fp32", "bf16", "fp32"),
}

_SWITCHES = ("average", "per_token", "gather_group", "nan_check", "offload")

#: What a scenario does. After it every case trains on, for two steps: `CLOSING_BOUNDS`.
SCENARIOS: dict[Scenario, str] = {
    "train": "a step",
    "unmarked": "no microbatch is marked as the last; the gradients are requested afterwards",
    "again": "a further backward pass after the last one of a step; the gradients are dropped",
    "redirected": "the communication dtype changes between steps, and back",
    "equalised": "ranks start from different weights and are made equal",
    "ahead": "evaluations between microbatches; weights gathered ahead just before each step",
    "exported": "whole weights by every way out of the engine, and by files in again",
    "reloaded": "after an evaluation other weights are loaded, then a state that lacks an entry",
}

#: Toy models that were cut by tensor parallelism over this many ranks, or spread their experts.
TENSOR_PARALLEL: dict[str, int] = {"rowwise": 2}
EXPERT_PARALLEL: dict[str, int] = {"experts": 2}

CLIP_NORM = 0.05
#: Bounds of clipping of the last two steps of a case: every norm is above one, none the other.
CLOSING_BOUNDS = (CLIP_NORM, 1e6)
_ROWWISE = re.compile(r"blocks\.\d+\.weight$")
_EXPERT = re.compile(r"blocks\.1\.")
_LEARNING_RATE = 0.01
# Stands in for an architecture, which a toy model is not described by; no engine reads it.
_SHAPE = ModelShape(
    preset="toy",
    layers=3,
    hidden=6,
    ffn_hidden=10,
    heads=1,
    kv_heads=1,
    head_dim=6,
    vocab=11,
    tie_embeddings=False,
)


@dataclass(frozen=True)
class Case:
    """outer: ranks of the outer data-parallel axis, 1 is none. microbatches: per step and rank.

    reshard: ranks of the groups that keep weights between the passes (fsdp2), 0 is not checked.
    front: by which interface (mfsdp). offload: to host memory (mfsdp, fsdp2).
    """

    engine: str
    strategy: StrategyName
    model: str = "stack"
    policy: Policy = "fp64"
    ranks: int = 2
    outer: int = 1
    outer_strategy: OuterStrategyName = "no_shard"
    microbatches: int = 1
    scenario: Scenario = "train"
    average: bool = False
    overlap: bool = True
    transport: TransportName = DEFAULT_TRANSPORT
    gather_group: bool = False
    allocator: AllocatorName = "storage_resize"
    recipe: RecipeName = "none"
    per_token: bool = False
    nan_check: bool = False
    reshard: int = 0
    front: FrontName = "megatron"
    optimizer: Literal["adamw", "muon"] = "adamw"
    offload: bool = False

    @property
    def id(self) -> str:
        """Readable and unique, as `mfsdp/optim/2x2hfsdp/stack/fp64/k3`."""
        parts = [self.engine, self.strategy, self.mesh, self.model, self.policy]
        parts.append(f"k{self.microbatches}")
        if self.scenario != "train":
            parts.append(self.scenario)
        parts += [name for name in _SWITCHES if getattr(self, name)]
        parts += [] if self.overlap else ["no_overlap"]
        parts += [] if self.transport == DEFAULT_TRANSPORT else [self.transport]
        parts += [] if self.allocator == "storage_resize" else [self.allocator]
        parts += [] if self.recipe == "none" else [self.recipe]
        parts += [f"reshard{self.reshard}"] if self.reshard else []
        parts += [] if self.front == "megatron" else [f"front_{self.front}"]
        parts += [] if self.optimizer == "adamw" else [self.optimizer]
        return "/".join(parts)

    @property
    def sharded(self) -> frozenset[Part]:
        """What the ranks of the inner axis share out among them."""
        return SHARDED[self.strategy]

    @property
    def shards_outside(self) -> bool:
        """Whether the ranks of the outer axis share something out as well."""
        return bool(SHARDED[self.outer_strategy])

    @property
    def mesh(self) -> str:
        """Ranks, as `4`, `2x2hsdp` (outer x inner) or `2x2hfsdp`."""
        if self.tensor > 1:
            return f"{self.data_ranks}x{self.tensor}tp"
        if self.outer == 1:
            return f"{self.ranks}"
        kind = HYBRID_NAMES[self.outer_strategy]
        return f"{self.outer}x{self.inner}{kind}"

    @property
    def tensor(self) -> int:
        """Ranks that hold parts of the same parameters and see the same data."""
        return TENSOR_PARALLEL.get(self.model, 1)

    @property
    def data_ranks(self) -> int:
        """Ranks that gradients are averaged over."""
        return self.ranks // self.tensor

    @property
    def inner(self) -> int:
        """Ranks of the inner data-parallel axis."""
        return self.data_ranks // self.outer

    def data_rank(self, rank: int) -> int:
        """Which data `rank` sees; tensor-parallel ranks are neighbours."""
        return rank // self.tensor

    def expert_peers(self, rank: int) -> list[int]:
        """Ranks whose tokens meet the experts of `rank`, itself first."""
        size = EXPERT_PARALLEL.get(self.model, 1)
        first = rank // size * size
        return [rank, *(peer for peer in range(first, first + size) if peer != rank)]

    def holders(self, name: str) -> int:
        """Different parts, or experts, that ranks hold under this parameter's name; equal ones."""
        apart = {"rowwise": _ROWWISE, "experts": _EXPERT}.get(self.model)
        if apart is None or not apart.match(name):
            return 1
        return TENSOR_PARALLEL.get(self.model, 1) * EXPERT_PARALLEL.get(self.model, 1)

    def resolved(self, device: Literal["cpu", "cuda"]) -> ResolvedRun:
        """The run that an engine is built from; the toy model stands in for the shape."""
        compute, main, grads, comm = POLICIES[self.policy]
        return ResolvedRun(
            shape=_SHAPE,
            recompute="none",
            data=DataSpec(),
            engine=EngineSpec.model_validate(
                {
                    "name": self.engine,
                    "strategy": self.strategy,
                    "outer_strategy": self.outer_strategy,
                    "outer_size": self.outer,
                    "overlap_param_gather": self.overlap,
                    # Where gradients are sharded, they cannot wait for each other.
                    "overlap_grad_reduce": self.overlap or "gradients" in self.sharded,
                    "average_in_collective": self.average,
                    "per_token_loss": self.per_token,
                    "nan_check": self.nan_check,
                    "transport": self.transport,
                    "allocator": self.allocator,
                    "recipe": self.recipe,
                    "separate_gather_group": self.gather_group,
                    "double_buffer": self.allocator in POOLS,
                    "offload": self.offload,
                    **({"reshard_after_forward": self.reshard} if self.reshard else {}),
                    **({} if self.front == "megatron" else {"front": self.front}),
                }
            ),
            dtypes=ResolvedDtypes(
                compute=compute,
                main_params=main,
                main_grads=grads,
                grad_comm=comm,
                reduce=comm if self.transport == "native" else None,
            ),
            train=TrainSpec(
                steps=1 + len(CLOSING_BOUNDS),
                global_batch=2 * self.data_ranks * self.microbatches,
                micro_batch=2,
                seq_len=5,
                optimizer=self.optimizer,
                lr=_LEARNING_RATE,
                clip_norm=CLIP_NORM,
            ),
            launch=LaunchSpec(ranks=self.ranks, device=device),
            measure=MeasureSpec(),
            data_parallel=self.data_ranks,
            microbatches=self.microbatches,
        )


#: A program among the cases of an engine: a refusal counts as a failure.
AnyCase = Case | Program
