"""One run: as the user wrote it, and resolved, with nothing left open."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import Field, ValidationError, field_serializer, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from bench.redaction import redact
from bench.spec.engine import EngineSpec
from bench.spec.engine_table import IMPORT_PATH_FORM, engine_names, find_engine
from bench.spec.model import LinearLayers, ModelShape, ModelSpec
from bench.spec.names import (
    HYBRID_NAMES,
    SHARDED,
    DataKind,
    DeviceType,
    DtypeName,
    Frozen,
    NcclRecord,
    Profile,
    Recompute,
    StrategyName,
    Switch,
)


class DataSpec(Frozen):
    """Where tokens come from."""

    kind: DataKind = "markov"
    """Bytes of text, a Markov chain that a model can learn, or random tokens."""
    path: str | None = None
    """A file or folder of text; null is the source of the standard library."""
    seed: int = 0
    """Of the Markov chain and of random tokens."""


class DtypeSpec(Frozen):
    """Compute dtype and the three dtypes of `MixedPrecisionPolicy`; null follows its rules."""

    compute: DtypeName = "fp32"
    """Of activations and of the weights that modules compute with."""
    main_params: DtypeName | None = "fp32"
    """Of the weights that the optimizer updates; null: the compute weights are these."""
    main_grads: DtypeName | None = None
    """Of the gradients that the optimizer reads."""
    grad_comm: DtypeName | None = None
    """In which gradients are sent."""
    reduce: DtypeName | None = None
    """In which ranks' gradients are added up; null: as the gradients where the engine can."""


class TrainSpec(Frozen):
    """Batch, length and optimizer."""

    steps: int = Field(default=20, ge=1)
    """Optimizer steps of a run."""
    global_batch: int = Field(default=8, ge=1)
    """Sequences of one step, over all ranks."""
    micro_batch: int = Field(default=2, ge=1)
    """Sequences of one forward pass on one rank."""
    seq_len: int = Field(default=64, ge=1)
    """Tokens of a sequence."""
    optimizer: Literal["adamw", "sgd", "precision_aware_adamw", "fused_adam", "muon"] = "adamw"
    """fused_adam is Transformer Engine's; muon steps 2-D weights of units, and AdamW the rest."""
    state_dtype: DtypeName = "fp32"
    """Of the moments; precision_aware_adamw and fused_adam alone."""
    master_weights: bool = False
    """A second copy of every weight in the optimizer; of the same two alone."""
    store_remainders: bool = False
    """Keep what BF16 main weights lack to FP32; of the same two alone."""
    lr: float = Field(default=3e-4, gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest norm of the gradient; null does not clip."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Of AdamW, decoupled."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    seed: int = 1234
    """Of the initial weights and the order of the data."""


class LaunchSpec(Frozen):
    """Processes and their environment. Limits and native_dtypes change no result: not hashed.

    Written as JSON, `env` is without credentials, and so is the hash: a password changes no result.
    """

    ranks: int = Field(default=2, ge=1)
    """Processes of the whole run, the same number on each node."""
    nodes: int = Field(default=1, ge=1)
    """Machines."""
    device: DeviceType = "cpu"
    """What ranks compute on."""
    threads_per_rank: int = Field(default=1, ge=1)
    """Threads of an operation on a CPU."""
    ranks_per_device: int = Field(default=1, ge=1, le=16)
    """Neighbours that share a CUDA device (NCCL 2.30 and later); times then mean nothing."""
    copy_engine: bool = False
    """Let the copy engine do gathers of registered windows (NCCL_CTA_POLICY)."""
    nvls: Switch = "default"
    """SHARP in NVLink switches; default leaves it to NCCL."""
    collnet: Switch = "default"
    """SHARP in the network; default leaves it to NCCL."""
    native_dtypes: bool = False
    """Prune a cell whose dtype this machine's processor would emulate: its times say nothing."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the ranks."""
    timeout_seconds: float = Field(default=600.0, gt=0, le=1e8)
    """A run that takes longer is ended."""
    hang_seconds: float = Field(default=120.0, gt=0, le=1e8)
    """A run without a step for so long is ended."""

    @property
    def nccl_variables(self) -> dict[str, str]:
        """The environment that copy_engine, nvls and collnet stand for."""
        variables = {"NCCL_CTA_POLICY": "2"} if self.copy_engine else {}
        for name, value in (("NVLS", self.nvls), ("COLLNET", self.collnet)):
            if value != "default":
                variables[f"NCCL_{name}_ENABLE"] = "1" if value == "on" else "0"
        return variables

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node: `resolve` refuses what does not divide."""
        return self.ranks // self.nodes

    @property
    def devices_per_node(self) -> int:
        """CUDA devices that the ranks of a node take."""
        return -(-self.ranks_per_node // self.ranks_per_device)

    @field_serializer("env", when_used="json")
    def _without_credentials(self, env: dict[str, str]) -> Any:
        return redact(env)


class MeasureSpec(Frozen):
    """What is measured besides time. A profiled run is not comparable in time."""

    profile: Profile = "none"
    """memory follows what autograd saves; torch writes a trace of three steps per rank."""
    nvtx: bool = False
    """Name the parts of all steps for nsys, without torch's profiler: one of the two has CUPTI."""
    nccl: NcclRecord = "none"
    """evidence keeps NCCL's own account of every collective, in a run of a few steps."""
    counts: bool = False
    """Count what a few more steps do, behind the last timed one, so that times stand."""

    @property
    def comparable_in_time(self) -> bool:
        """Whether nothing slows the run down."""
        return self.profile == "none" and self.nccl == "none" and not self.nvtx


class RunSpec(Frozen):
    """One run as the user wrote it; every section may be left out."""

    model: ModelSpec = ModelSpec()
    """The model that is trained."""
    data: DataSpec = DataSpec()
    """The tokens that it sees."""
    engine: EngineSpec = EngineSpec()
    """The implementation under test, and its settings."""
    dtypes: DtypeSpec = DtypeSpec()
    """Compute dtype and those of main weights, gradients and communication."""
    train: TrainSpec = TrainSpec()
    """How it is trained."""
    launch: LaunchSpec = LaunchSpec()
    """Processes and their environment."""
    measure: MeasureSpec = MeasureSpec()
    """What is measured besides time."""

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, engine: EngineSpec) -> EngineSpec:
        if find_engine(engine.name) is None:
            names = (*engine_names(), IMPORT_PATH_FORM)
            expected = ", ".join(f"'{name}'" for name in names)
            message = "Input should be {expected}"
            kind = PydanticCustomError("literal_error", message, {"expected": expected})
            problem = InitErrorDetails(type=kind, loc=("name",), input=engine.name)
            raise ValidationError.from_exception_data(cls.__name__, [problem])
        return engine


class ResolvedDtypes(Frozen):
    """Dtypes with nothing left open. `main_params` None: the compute weights are the main ones.

    `reduce` None: as sent.
    """

    compute: DtypeName
    main_params: DtypeName | None
    main_grads: DtypeName
    grad_comm: DtypeName
    reduce: DtypeName | None = None


class ResolvedRun(Frozen):
    """A run that can start: every choice made, checked against the machine it will run on.

    `data_parallel` is the number of ranks that split the global batch (1 for `single`, whose one
    rank consumes all of it; ranks of a tensor-parallel group share theirs); `microbatches` is per
    rank and step: `global_batch == data_parallel * micro_batch * microbatches`. `factory` names a
    model of the user's own, about which nothing is known: `shape` then is None.
    """

    shape: ModelShape | None
    recompute: Recompute
    data: DataSpec
    engine: EngineSpec
    dtypes: ResolvedDtypes
    train: TrainSpec
    launch: LaunchSpec
    measure: MeasureSpec
    data_parallel: int
    microbatches: int
    factory: str | None = None
    linear: LinearLayers = LinearLayers()
    loss_chunks: int = 1

    @property
    def comparable_in_time(self) -> bool:
        """Whether its times mean something: nothing slows it down, and no rank shares a device."""
        return self.measure.comparable_in_time and self.launch.ranks_per_device == 1

    @property
    def gathers_matrices(self) -> bool:
        """Whether its optimizer puts whole matrices together in a step, which no ledger books."""
        wants = self.train.optimizer == "muon" or self.engine.setting("matrices") == "whole"
        return wants and "optimizer" in SHARDED[self.strategy]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.train.global_batch * self.train.seq_len

    @property
    def model_name(self) -> str:
        """What the model is called, as a part of a file name: `tiny`, `mine.build`."""
        named = self.factory if self.shape is None else self.shape.preset
        return (named or "unnamed").replace(":", ".")

    @property
    def model_text(self) -> str:
        """The model in a sentence: `tiny, 14,817,792 parameters`."""
        if self.shape is None:
            return f"{self.factory}, a model of the user's own"
        return f"{self.shape.preset}, {self.shape.parameters:,} parameters"

    @property
    def strategy(self) -> StrategyName:
        """The sharding strategy; resolution has filled it in."""
        if self.engine.strategy is None:
            raise ValueError("a ResolvedRun without a strategy: build it with bench.resolve")
        return self.engine.strategy

    def canonical_json(self) -> str:
        """The text that is hashed: sorted keys, and only settings that differ from their default.

        So a setting that is added later leaves the hashes of runs without it as they were. Without
        limits that cannot change a result.
        """
        document = self.model_dump(mode="json", exclude_defaults=True)
        for limit in ("timeout_seconds", "hang_seconds", "native_dtypes"):
            document["launch"].pop(limit, None)
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @property
    def config_hash(self) -> str:
        """First 12 hex digits of the SHA-256 of `canonical_json`."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()[:12]

    @property
    def slug(self) -> str:
        """Readable start of the folder name, as `tiny-mfsdp-optim-bf16-2xcpu`."""
        row = self.engine.row
        parts = [self.model_name, self.engine.name.replace(":", ".")]
        if row is None or not row.one_process:
            parts.append(self.strategy)
        if self.engine.outer_size > 1:
            parts.append(f"{HYBRID_NAMES[self.engine.outer_strategy]}{self.engine.outer_size}")
        for short, size in (
            ("tp", self.engine.tensor_parallel),
            ("ep", self.engine.expert_parallel),
        ):
            parts += [f"{short}{size}"] if size > 1 else []
        parts.append(self.dtypes.compute)
        if self.linear.kind != "torch":
            codes = ["codes"] if self.linear.quantised_weights else []
            parts += [self.linear.kind, self.linear.recipe, *codes]
        if self.engine.setting("recipe") not in (None, "none"):
            parts.append(self.engine.setting("recipe"))
        if self.dtypes.grad_comm != self.dtypes.compute:
            parts.append(f"comm_{self.dtypes.grad_comm}")
        if self.dtypes.reduce not in (None, self.dtypes.grad_comm):
            parts.append(f"sum_{self.dtypes.reduce}")
        parts.append(f"{self.launch.ranks}x{self.launch.device}")
        if self.launch.nodes > 1:
            parts.append(f"{self.launch.nodes}nodes")
        return "-".join(parts)
