"""One run: as the user wrote it, and resolved, with nothing left open."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import Field, ValidationError, field_serializer, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from bench.redaction import redact
from bench.spec.engine import EngineSpec
from bench.spec.engine_lookup import IMPORT_PATH_FORM, engine_names, find_engine
from bench.spec.engine_table import CollectiveSettings
from bench.spec.model import LinearLayers, ModelShape, ModelSpec
from bench.spec.names import (
    HYBRID_NAMES,
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


class TrainSpec(Frozen):
    """Batch, length and optimizer. Batches count sequences; `seq_len` counts tokens.

    state_dtype (of the moments), master_weights (a second copy of every weight inside the
    optimizer) and store_remainders (what BF16 main weights lack to FP32) are settings of
    `precision_aware_adamw` and of Transformer Engine's `fused_adam` (CUDA), which also read
    decoupled gradients. adamw_8bit, adamw_fp8: torchao's, whose moments are codes with a scale per
    256 elements.
    checkpoint_every: save weights and optimizer state after every that many steps, and record what
    it took; None never saves.
    """

    steps: int = Field(default=20, ge=1)
    global_batch: int = Field(default=8, ge=1)
    micro_batch: int = Field(default=2, ge=1)
    seq_len: int = Field(default=64, ge=1)
    optimizer: Literal[
        "adamw", "sgd", "precision_aware_adamw", "fused_adam", "adamw_8bit", "adamw_fp8"
    ] = "adamw"
    state_dtype: DtypeName = "fp32"
    master_weights: bool = False
    store_remainders: bool = False
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
    """Processes and their environment. The two limits do not change a result and are not hashed.

    ranks: of the whole run, the same number on each of its `nodes`. ranks_per_device: neighbours
    that share a CUDA device, which NCCL 2.30 and later can: a test of what ranks do to each other
    on few devices. Times then mean nothing.

    copy_engine: let the copy engine do gathers of registered windows (NCCL_CTA_POLICY). nvls,
    collnet: SHARP in NVLink switches and in the network, on or off; default leaves it to NCCL. What
    came of them only NCCL's log tells.

    Written as JSON, `env` is without credentials, and so is the hash: a password changes no result.
    """

    ranks: int = Field(default=2, ge=1)
    nodes: int = Field(default=1, ge=1)
    device: DeviceType = "cpu"
    threads_per_rank: int = Field(default=1, ge=1)
    ranks_per_device: int = Field(default=1, ge=1, le=16)
    copy_engine: bool = False
    nvls: Switch = "default"
    collnet: Switch = "default"
    env: dict[str, str] = Field(default_factory=dict)
    timeout_seconds: float = Field(default=600.0, gt=0, le=1e8)
    hang_seconds: float = Field(default=120.0, gt=0, le=1e8)

    @property
    def nccl_variables(self) -> dict[str, str]:
        """The environment that copy_engine, nvls and collnet stand for."""
        found = {"NCCL_CTA_POLICY": "2"} if self.copy_engine else {}
        for name, value in (("NVLS", self.nvls), ("COLLNET", self.collnet)):
            if value != "default":
                found[f"NCCL_{name}_ENABLE"] = "1" if value == "on" else "0"
        return found

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
    """What is measured beside time. A profiled run is not comparable in time.

    profile: `memory` follows what autograd saves; `torch` writes a trace of three steps per rank.
    nccl: `evidence` keeps NCCL's own account of every collective, in a run of a few steps. counts:
    count what a few more steps do, behind the last timed one, so that times stand.
    """

    profile: Profile = "none"
    nccl: NcclRecord = "none"
    counts: bool = False

    @property
    def comparable_in_time(self) -> bool:
        """Whether nothing slows the run down."""
        return self.profile == "none" and self.nccl == "none"


class RunSpec(Frozen):
    """One run as the user wrote it; every section may be left out."""

    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    engine: EngineSpec = EngineSpec()
    dtypes: DtypeSpec = DtypeSpec()
    train: TrainSpec = TrainSpec()
    launch: LaunchSpec = LaunchSpec()
    measure: MeasureSpec = MeasureSpec()

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
    """Dtypes with nothing left open. `main_params` None: the compute weights are the main ones."""

    compute: DtypeName
    main_params: DtypeName | None
    main_grads: DtypeName
    grad_comm: DtypeName


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

    @property
    def comparable_in_time(self) -> bool:
        """Whether its times mean something: nothing slows it down, and no rank shares a device."""
        return self.measure.comparable_in_time and self.launch.ranks_per_device == 1

    @property
    def collective(self) -> CollectiveSettings | None:
        """The collective that is timed by itself; None for a run that trains."""
        settings = self.engine.settings
        return settings if isinstance(settings, CollectiveSettings) else None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch; none where nothing is trained."""
        return 0 if self.collective is not None else self.train.global_batch * self.train.seq_len

    @property
    def work_per_step(self) -> int:
        """What throughput counts: tokens, or the bytes of a collective."""
        return self.tokens_per_step if self.collective is None else self.collective.size_bytes

    @property
    def model_name(self) -> str:
        """What the model is called, as a part of a file name: `tiny`, `mine.build`."""
        if self.collective is not None:
            return f"{self.collective.operation}-{_size_text(self.collective.size_bytes)}"
        named = self.factory if self.shape is None else self.shape.preset
        return (named or "unnamed").replace(":", ".")

    @property
    def model_text(self) -> str:
        """The model in a sentence: `tiny, 14,817,792 parameters`."""
        if self.collective is not None:
            return f"none: {self.collective.operation} of {self.collective.size_bytes:,} bytes"
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
        for limit in ("timeout_seconds", "hang_seconds"):
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
        if self.collective is not None:
            parts += [self.collective.registration, self.collective.transport]
        elif row is None or not row.one_process:
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
        parts.append(f"{self.launch.ranks}x{self.launch.device}")
        if self.launch.nodes > 1:
            parts.append(f"{self.launch.nodes}nodes")
        return "-".join(parts)


def _size_text(size_bytes: int) -> str:
    """The largest binary unit that divides it: `8MiB`, `1000B`."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power}{unit}"
    return f"{size_bytes}B"
