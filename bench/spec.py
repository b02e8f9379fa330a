"""What the user asks for in one run: frozen, validated, torch-free.

`RunSpec` is the request (fields may be None, meaning "the engine's default"). `bench.resolve` turns
it into a `ResolvedRun`, in which nothing is left open, and which is hashed to name the run.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

DtypeName = Literal["fp64", "fp32", "bf16", "fp16"]
EngineName = Literal["single", "ddp", "fsdp2", "mfsdp"]
StrategyName = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
OuterStrategyName = Literal["no_shard", "optim"]
Recompute = Literal["none", "full", "selective"]
DataKind = Literal["text", "markov", "random"]
DeviceType = Literal["cpu", "cuda"]
AllocatorName = Literal["temporary", "storage_resize", "fixed_pool", "max_pool"]
#: Allocators whose slots exist from the start.
POOLS: tuple[AllocatorName, ...] = ("fixed_pool", "max_pool")
TransportName = Literal["auto", "native", "point_to_point"]
Profile = Literal["none", "memory"]
NcclRecord = Literal["none", "evidence"]


BLOCK_LETTERS: Final = {
    "M": "Mamba-2",
    "*": "attention",
    "E": "experts",
    "-": "feed-forward",
}
"""Blocks of a hybrid (state space, attention, mixture of experts), in Nemotron-H's notation."""


class Frozen(BaseModel):
    """Immutable, and an unknown key is an error rather than a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSpec(Frozen):
    """A preset of `bench.resolve.presets`, with single fields replaced where they are not None.

    pattern, experts, experts_per_token: of the hybrid family only; see `HybridShape`.
    """

    preset: str = "debug"
    layers: int | None = Field(default=None, ge=1)
    hidden: int | None = Field(default=None, ge=1)
    ffn_hidden: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    vocab: int | None = Field(default=None, ge=2)
    tie_embeddings: bool | None = None
    pattern: str | None = None
    experts: int | None = Field(default=None, ge=1)
    experts_per_token: int | None = Field(default=None, ge=1)
    recompute: Recompute = "none"


class DataSpec(Frozen):
    """Where tokens come from; `path` (file or folder, `text` only) None is the standard library."""

    kind: DataKind = "markov"
    path: str | None = None
    seed: int = 0


class DtypeSpec(Frozen):
    """Compute dtype and the three dtypes of `MixedPrecisionPolicy`; None follows its rules."""

    compute: DtypeName = "fp32"
    main_params: DtypeName | None = "fp32"
    main_grads: DtypeName | None = None
    grad_comm: DtypeName | None = None


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


class TrainSpec(Frozen):
    """Batch, length and optimizer. Batches count sequences; `seq_len` counts tokens.

    state_dtype (of the moments) and master_weights (a second copy of every weight inside the
    optimizer) are settings of `precision_aware_adamw`, which also reads decoupled gradients.
    checkpoint_every: save weights and optimizer state after every that many steps, and record what
    it took; None never saves.
    """

    steps: int = Field(default=20, ge=1)
    global_batch: int = Field(default=8, ge=1)
    micro_batch: int = Field(default=2, ge=1)
    seq_len: int = Field(default=64, ge=1)
    optimizer: Literal["adamw", "sgd", "precision_aware_adamw"] = "adamw"
    state_dtype: DtypeName = "fp32"
    master_weights: bool = False
    checkpoint_every: int | None = Field(default=None, ge=1)
    lr: float = Field(default=3e-4, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    clip_norm: float | None = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    seed: int = 1234


class LaunchSpec(Frozen):
    """Processes and their environment. The two limits do not change a result and are not hashed."""

    ranks: int = Field(default=2, ge=1)
    device: DeviceType = "cpu"
    threads_per_rank: int = Field(default=1, ge=1)
    env: dict[str, str] = Field(default_factory=dict)
    timeout_seconds: float = Field(default=600.0, gt=0, le=1e8)
    hang_seconds: float = Field(default=120.0, gt=0, le=1e8)


class MeasureSpec(Frozen):
    """What is measured beside time. A profiled run is not comparable in time.

    nccl: `evidence` keeps NCCL's own account of every collective, in a run of a few steps.
    """

    profile: Profile = "none"
    nccl: NcclRecord = "none"

    @property
    def comparable_in_time(self) -> bool:
        """Whether nothing slows the run down."""
        return self.profile == "none" and self.nccl == "none"


#: (section, setting, default): left out of a run's name at their default, so that runs from before
#: the setting existed keep theirs.
_LATER_SETTINGS: tuple[tuple[str, str, object], ...] = (
    ("shape", "hybrid", None),
    ("measure", "nccl", "none"),
    ("engine", "decoupled_grad", False),
    ("engine", "separate_gather_group", False),
    ("engine", "pool_slots", 2),
    ("engine", "fine_grained_gather", None),
    ("engine", "fine_grained_gather", False),
    ("train", "state_dtype", "fp32"),
    ("train", "master_weights", False),
    ("train", "checkpoint_every", None),
)


class RunSpec(Frozen):
    """One run as the user wrote it; every section may be left out."""

    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    engine: EngineSpec = EngineSpec()
    dtypes: DtypeSpec = DtypeSpec()
    train: TrainSpec = TrainSpec()
    launch: LaunchSpec = LaunchSpec()
    measure: MeasureSpec = MeasureSpec()


class HybridShape(Frozen):
    """What a hybrid of block kinds has besides the numbers of `ModelShape`; counts in elements.

    pattern: one letter of `BLOCK_LETTERS` per block (attention is without rotary embedding).
    mamba_groups: groups of heads that share B and C. state: size of the state per channel. chunk:
    tokens that the scan takes at once. expert_hidden, shared_expert_hidden: widths of a routed
    expert and of the one that every token visits (0: none). routed_scale: factor on the output of
    the routed experts.
    """

    pattern: str
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    state: int
    conv_kernel: int = 4
    chunk: int = 128
    experts: int
    experts_per_token: int
    expert_hidden: int
    shared_expert_hidden: int
    routed_scale: float = 1.0

    @property
    def mamba_inner(self) -> int:
        """Channels inside a Mamba block."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def mamba_convolved(self) -> int:
        """Channels that pass the convolution: the inner ones, B and C."""
        return self.mamba_inner + 2 * self.mamba_groups * self.state


class ModelShape(Frozen):
    """A decoder's architecture; every count in elements, not bytes.

    A Llama where `hybrid` is None. In a hybrid, `layers` is the number of blocks and `ffn_hidden`
    the width of its `-` blocks, and feed-forward and experts are not gated.
    """

    preset: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tie_embeddings: bool
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    hybrid: HybridShape | None = None

    @property
    def parameters(self) -> int:
        """Number of distinct parameters (a tied embedding counts once)."""
        embeddings = self.vocab * self.hidden * (1 if self.tie_embeddings else 2)
        return self._block_parameters() + embeddings + self.hidden

    @property
    def attention_weights(self) -> int:
        """Elements of the four projections of one attention."""
        query = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        return self.hidden * (query + 2 * kv) + query * self.hidden

    def _block_parameters(self) -> int:
        hidden, hybrid = self.hidden, self.hybrid
        if hybrid is None:
            layer = self.attention_weights + 3 * hidden * self.ffn_hidden + 2 * hidden
            return self.layers * layer
        inner, convolved = hybrid.mamba_inner, hybrid.mamba_convolved
        mamba = hidden * (inner + convolved + hybrid.mamba_heads) + inner * hidden + inner
        mamba += convolved * (hybrid.conv_kernel + 1) + 3 * hybrid.mamba_heads
        expert_widths = hybrid.experts * hybrid.expert_hidden + hybrid.shared_expert_hidden
        each = {
            "M": mamba,
            "*": self.attention_weights,
            "E": hidden * hybrid.experts + 2 * hidden * expert_widths,
            "-": 2 * hidden * self.ffn_hidden,
        }
        # One norm before every block.
        return sum(each[letter] + hidden for letter in hybrid.pattern)


class ResolvedDtypes(Frozen):
    """Dtypes with nothing left open. `main_params` None: the compute weights are the main ones."""

    compute: DtypeName
    main_params: DtypeName | None
    main_grads: DtypeName
    grad_comm: DtypeName


class ResolvedRun(Frozen):
    """A run that can start: every choice made, checked against the machine it will run on.

    `data_parallel` is the number of ranks that split the global batch (1 for `single`, whose one
    rank consumes all of it); `microbatches` is per rank and step:
    `global_batch == data_parallel * micro_batch * microbatches`.
    """

    shape: ModelShape
    recompute: Recompute
    data: DataSpec
    engine: EngineSpec
    dtypes: ResolvedDtypes
    train: TrainSpec
    launch: LaunchSpec
    measure: MeasureSpec
    data_parallel: int
    microbatches: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.train.global_batch * self.train.seq_len

    @property
    def strategy(self) -> StrategyName:
        """The sharding strategy; resolution has filled it in."""
        if self.engine.strategy is None:
            raise ValueError("a ResolvedRun without a strategy: build it with bench.resolve")
        return self.engine.strategy

    def canonical_json(self) -> str:
        """The text that is hashed: sorted keys, no host, no limit that cannot change a result."""
        document = self.model_dump(mode="json")
        for limit in ("timeout_seconds", "hang_seconds"):
            del document["launch"][limit]
        for section, setting, default in _LATER_SETTINGS:
            if document[section].get(setting, ...) == default:
                del document[section][setting]
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @property
    def config_hash(self) -> str:
        """First 12 hex digits of the SHA-256 of `canonical_json`."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()[:12]

    @property
    def slug(self) -> str:
        """Readable start of the folder name, as `tiny-mfsdp-optim-bf16-2xcpu`."""
        parts = [self.shape.preset, self.engine.name]
        if self.engine.name != "single":
            parts.append(self.strategy)
        if self.engine.outer_size > 1:
            kind = "hfsdp" if self.engine.outer_strategy == "optim" else "hsdp"
            parts.append(f"{kind}{self.engine.outer_size}")
        parts.append(self.dtypes.compute)
        if self.dtypes.grad_comm != self.dtypes.compute:
            parts.append(f"comm_{self.dtypes.grad_comm}")
        parts.append(f"{self.launch.ranks}x{self.launch.device}")
        return "-".join(parts)
