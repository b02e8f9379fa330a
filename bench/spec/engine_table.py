"""The table of engines, and engines by name. To add one: a row, and the module of its factory.

    class Engine                what `factory` names or builds: `bench.engines.protocol`
    its own settings            a model of single values, here, so that a plan needs no torch
    everything else             columns of `EngineRow`, known before an engine is loaded

An engine of another package is named by its import path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field

from bench.errors import ConfigError
from bench.spec.names import (
    DEFAULT_TRANSPORT,
    POOLS,
    STRATEGIES,
    AllocatorName,
    DeviceType,
    DtypeName,
    FrontName,
    Frozen,
    GatherPrecisionName,
    OuterStrategyName,
    ParallelismName,
    RecipeName,
    StrategyName,
    TransportName,
)


class SharedSettings(Frozen):
    """Settings that every engine has."""

    name: str = "mfsdp"
    """The engine; package.module:factory runs code of that module in the ranks."""
    strategy: StrategyName | None = None
    """What is sharded over ranks; null is the engine's default."""
    outer_strategy: OuterStrategyName = "no_shard"
    """What is sharded over the outer data-parallel axis as well."""
    outer_size: int = Field(default=1, ge=1)
    """Size of the outer data-parallel axis; 1 is none."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share every layer of a Llama and train on the same data."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks that share the experts of a hybrid and train on data of their own."""


SHARED_SETTINGS = tuple(SharedSettings.model_fields)


class EngineSettings(Frozen):
    """Base of an engine's own settings: single values, each with a default.

    A sweep writes them as `engine.NAME`. Only values that differ from their default are hashed, so
    a setting may be added at any time without giving old runs another name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True)
class DtypePolicies:
    """The dtype policies that an engine follows exactly; without arguments: every one.

    main: dtypes of main weights; None is any. gradients_as_main: gradients have the dtype of the
    main weights. autocast: compute dtypes that it reaches from fp32 main weights by autocast; None
    says that it casts by itself, to any. wire: dtypes it can send gradients in besides their own;
    None is any, () says that it sends nothing. sums: whether it adds up what ranks send in a dtype
    that holds more than the wire's, if wanted; else in the wire's, as torch's collectives do.
    sends_as_computed: gradients travel in the compute dtype alone.
    """

    main: tuple[DtypeName, ...] | None = None
    gradients_as_main: bool = False
    autocast: tuple[DtypeName, ...] | None = None
    wire: tuple[DtypeName, ...] | None = None
    sums: bool = False
    sends_as_computed: bool = False


@dataclass(frozen=True)
class EngineRow:
    """One engine.

    factory: `package.module:name`, called with a model, a `ResolvedRun` and a device; loaded
    in the ranks alone. settings: its own, besides those of `SHARED_SETTINGS`. strategies: the first
    one is the default. outer_axis: whether it splits ranks over a second data-parallel axis.
    hybrids: the strategies on both axes that it offers then; None is every pair. parallel: the ways
    to split a model that it shards as well. one_process: it has no process group, and one rank
    consumes the whole global batch. devices: what it runs on.
    needs: modules that must be installed. install: the command that does it. release: a package and
    the beginning of the versions that the engine calls rightly, as 0.6. code: files that are
    the engine, as patterns below a checkout of this repository; a factory elsewhere is found by its
    package. torch_code: those of torch, and of packages that are installed with it. colour: in
    figures, as `#0072B2`; None takes the next free one. established: a reference that the
    numerics of others may be compared with. whole_matrices: whether its optimizer can step on whole
    tensors. fronts: its rows behind other interfaces, by the value of the setting `front`.
    """

    name: str
    factory: str
    summary: str = ""
    settings: type[EngineSettings] = EngineSettings
    strategies: tuple[StrategyName, ...] = STRATEGIES
    outer_axis: bool = False
    hybrids: tuple[tuple[StrategyName, OuterStrategyName], ...] | None = None
    parallel: tuple[ParallelismName, ...] = ()
    one_process: bool = False
    devices: tuple[DeviceType, ...] = ("cpu", "cuda")
    dtypes: DtypePolicies = DtypePolicies()
    needs: tuple[str, ...] = ("torch",)
    install: str = ""
    release: tuple[str, str] | None = None
    code: tuple[str, ...] = ()
    torch_code: tuple[str, ...] = ()
    colour: str | None = None
    established: bool = False
    whole_matrices: bool = False
    fronts: tuple[tuple[FrontName, EngineRow], ...] = ()

    def other_release(self) -> str | None:
        """What to say if another release of its package is installed here."""
        package, wanted = self.release or ("", "")
        try:
            installed = metadata.version(package) if package else wanted
        except metadata.PackageNotFoundError:
            return None
        if f"{installed}.".startswith(f"{wanted}."):
            return None
        return (
            f"engine {self.name} calls {package} {wanted}, and other releases may take other "
            f"arguments; found {installed}: {self.install}"
        )


#: Settings as `fully_shard_model` calls them, where it has another name.
_ARGUMENTS: Final = {
    "double_buffer": "fsdp_double_buffer",
    "persistent_fallback": "fsdp_db_use_persist_buf_on_alloc_fail",
    "fine_grained_gather": "enable_fine_grained_param_gather",
    "decoupled_grad": "use_decoupled_grad",
    "nan_check": "report_nan_in_param_grad",
    "per_token_loss": "calculate_per_token_loss",
    "cuda_graph": "cuda_graph_mode",
}
#: Settings that are not arguments: they say what other arguments are made of.
_NO_ARGUMENTS: Final = {
    "separate_gather_group", "recipe", "gather_precision", "front", "matrices",
}  # fmt: skip


class MegatronSwitches(EngineSettings):
    """What megatron-fsdp and this project's core both have, under the core's names."""

    overlap_param_gather: bool = True
    """Gather the weights of the next unit while this one computes."""
    overlap_grad_reduce: bool = True
    """Reduce gradients while the backward pass goes on."""
    average_in_collective: bool = False
    """Average in the collective rather than scale gradients first."""
    nccl_ub: bool = False
    """Register communication buffers with NCCL."""
    symmetric_registration: bool = True
    """Register them as symmetric windows rather than plain buffers."""
    manual_registration: bool = False
    """Register user buffers after the first step rather than before it."""
    allocator: AllocatorName = "storage_resize"
    """Who serves the buffers that come and go with a unit."""
    double_buffer: bool = False
    """Serve units from a pool of slots."""
    persistent_fallback: bool = False
    """A buffer that fits no slot stays for good."""
    fine_grained_gather: bool | None = None
    """Gather module by module; null follows the rule of the recipe and the model."""
    decoupled_grad: bool = False
    """Hand gradients to the optimizer in a dtype of their own."""
    nan_check: bool = False
    """Look for NaN and Inf in every gradient of a parameter as it comes."""

    def arguments(self) -> dict[str, Any]:
        """Of `fully_shard_model`, which both have."""
        values = {
            _ARGUMENTS.get(name, name): value
            for name, value in self.model_dump(exclude=_NO_ARGUMENTS).items()
        }
        # The core chooses nothing: null is resolved, and False for engines without a rule.
        values["enable_fine_grained_param_gather"] = bool(self.fine_grained_gather)
        values["disable_symmetric_registration"] = not values.pop("symmetric_registration")
        return values


class MfsdpSettings(MegatronSwitches):
    """Switches of `mfsdp_core`, under the names of this harness."""

    front: FrontName = "megatron"
    """Through fully_shard_model, or through a fully_shard with FSDP2's signature."""
    offload: bool = False
    """Keep main weights, gradients and the optimizer's state in host memory."""
    matrices: Literal["needed", "whole"] = "needed"
    """Which optimizers step on whole matrices, each on one rank: those that need to, or all."""
    transport: TransportName = DEFAULT_TRANSPORT
    """What carries the bytes; auto chooses by host and device."""
    separate_gather_group: bool = False
    """Gather weights over a second process group."""
    pool_slots: int = Field(default=2, ge=2, le=1024)
    """Slots of a pool."""
    recipe: RecipeName = "none"
    """How matrices are quantised on their way."""
    gather_precision: GatherPrecisionName = "recipe"
    """What travels then: codes of the recipe, or weights that are quantised on arrival."""
    cuda_graph: bool = False
    """Capture a whole step as a CUDA graph, once, and replay it."""
    per_token_loss: bool = False
    """Add the gradients of all tokens up and divide once by their number."""


class Fsdp2Settings(EngineSettings):
    """Switches of `fully_shard`, under its names."""

    offload: bool = False
    """Keep main weights, gradients and the optimizer's state in host memory."""
    reshard_after_forward: int | None = Field(default=None, ge=2)
    """Between the passes a layer is kept in parts of this many ranks; null follows the strategy."""


class FrontSettings(Fsdp2Settings):
    """Switches of `mfsdp_core.fsdp2.fully_shard`."""

    front: FrontName = "megatron"
    """Always fsdp2 here; the default is that of the engine, so that a run's identity has it."""


class MegatronFsdpSettings(MegatronSwitches):
    """Switches of megatron-fsdp 0.6.1."""

    disable_bucketing: bool = False
    """Send each gradient by itself."""
    keep_fp8_transpose_cache: bool = False
    """Keep the transposed copy of weights that Transformer Engine has as codes."""

    def arguments(self) -> dict[str, Any]:
        """A pool is double buffers, and a switch says which; registration has no argument."""
        values = super().arguments()
        del values["manual_registration"], values["allocator"]
        values["fsdp_double_buffer"] |= self.allocator in POOLS
        return values | {"maxpool_double_buffer": self.allocator == "max_pool"}


# Torch's own engines keep gradients in the dtype of their parameters. They are matched to mfsdp on
# FP32 main weights, or on FP64 throughout as a reference: fsdp2 through MixedPrecisionPolicy, ddp
# and single by autocast, ddp's wire dtype by a communication hook.
_AUTOCAST = DtypePolicies(main=("fp32", "fp64"), gradients_as_main=True, autocast=("bf16", "fp16"))

_FSDP2: Final = EngineRow(
    name="fsdp2",
    factory="bench.engines.fsdp2:Fsdp2Engine",
    summary="torch's fully_shard",
    settings=Fsdp2Settings,
    # reshard_after_forward True and False.
    strategies=("optim_grads_params", "optim_grads"),
    outer_axis=True,
    hybrids=(("optim_grads_params", "no_shard"), ("optim_grads", "no_shard")),
    parallel=("tensor_parallel",),
    dtypes=DtypePolicies(_AUTOCAST.main, True),
    code=("bench/engines/fsdp2.py",),
    torch_code=("torch/distributed/fsdp/**/*.py",),
    colour="#0072B2",
    established=True,
)
# What FSDP2 offers, but for tensor parallelism.
_FRONT: Final = EngineRow(
    name="mfsdp with front=fsdp2",
    factory="bench.engines.mfsdp_front:FrontEngine",
    settings=FrontSettings,
    strategies=_FSDP2.strategies,
    outer_axis=True,
    hybrids=_FSDP2.hybrids,
    dtypes=_FSDP2.dtypes,
)

# The most widely used and simplest first: a report compares with the first that it finds.
TABLE: Final[tuple[EngineRow, ...]] = (
    EngineRow(
        name="ddp",
        factory="bench.engines.ddp:DdpEngine",
        summary="torch's DistributedDataParallel",
        strategies=("no_shard",),
        dtypes=DtypePolicies(_AUTOCAST.main, True, _AUTOCAST.autocast, wire=("bf16", "fp16")),
        code=("bench/engines/ddp.py",),
        torch_code=("torch/nn/parallel/**/*.py",),
        colour="#E69F00",
        established=True,
        whole_matrices=True,
    ),
    EngineRow(
        name="single",
        factory="bench.engines.single:SingleEngine",
        summary="plain autograd in one process",
        strategies=("no_shard",),
        one_process=True,
        dtypes=DtypePolicies(_AUTOCAST.main, True, _AUTOCAST.autocast, wire=()),
        code=("bench/engines/single.py",),
        colour="#000000",
        established=True,
        whole_matrices=True,
    ),
    _FSDP2,
    EngineRow(
        name="megatron_fsdp",
        factory="bench.engines.megatron_fsdp:MegatronFsdpEngine",
        summary="the package megatron-fsdp 0.6.1",
        settings=MegatronFsdpSettings,
        strategies=("optim_grads_params", "optim_grads", "optim", "no_shard"),
        outer_axis=True,
        hybrids=(
            *((inner, "no_shard") for inner in STRATEGIES),
            ("optim_grads_params", "optim"),
        ),
        devices=("cuda",),
        needs=("torch", "einops", "megatron_fsdp"),
        install="pip install --no-deps megatron-fsdp==0.6.1 einops",
        release=("megatron-fsdp", "0.6"),
        code=("bench/engines/megatron_fsdp.py",),
        torch_code=("megatron_fsdp/**/*.py",),
        colour="#009E73",
    ),
    EngineRow(
        name="megatron_fsdp_v2",
        factory="bench.engines.megatron_fsdp_v2:MegatronFsdpV2Engine",
        summary="megatron_fsdp.experimental, the second version in megatron-fsdp 0.6.1",
        strategies=("optim_grads_params",),
        outer_axis=True,
        hybrids=(("optim_grads_params", "no_shard"),),
        dtypes=DtypePolicies(sends_as_computed=True),
        devices=("cuda",),
        needs=("torch", "einops", "megatron_fsdp"),
        install="pip install --no-deps megatron-fsdp==0.6.1 einops",
        release=("megatron-fsdp", "0.6"),
        code=("bench/engines/megatron_fsdp_v2.py", "bench/engines/megatron_fsdp.py"),
        torch_code=("megatron_fsdp/**/*.py",),
        colour="#999999",
    ),
    EngineRow(
        name="mfsdp",
        factory="bench.engines.mfsdp:MfsdpEngine",
        summary="this project's core",
        settings=MfsdpSettings,
        strategies=("optim_grads_params", "optim_grads", "optim", "no_shard"),
        outer_axis=True,
        parallel=("tensor_parallel", "expert_parallel"),
        dtypes=DtypePolicies(sums=True),
        code=(
            "bench/engines/fsdp2.py",
            "bench/engines/mfsdp.py",
            "bench/engines/mfsdp_front.py",
            "bench/engines/mfsdp_inspection.py",
            "mfsdp_core/**/*.py",
        ),
        colour="#D55E00",
        whole_matrices=True,
        fronts=(("fsdp2", _FRONT),),
    ),
)


IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
IMPORT_PATH_FORM = "package.module:factory"


class SwitchesOfAnyEngine(MfsdpSettings):
    """What an engine given by its import path may read: the switches of mfsdp, all of them.

    It refuses (`UnsupportedError`) what it does not support.
    """


def is_import_path(name: str) -> bool:
    """Whether `name` has the form of `IMPORT_PATH_FORM`."""
    return re.fullmatch(IMPORT_PATH, name) is not None


def find_engine(name: str) -> EngineRow | None:
    """The row of an engine; None if no engine has this name."""
    for row in TABLE:
        if row.name == name:
            return row
    if is_import_path(name):
        return EngineRow(name, name, settings=SwitchesOfAnyEngine, outer_axis=True)
    return None


def known_engine(name: str) -> EngineRow:
    """The row of an engine.

    Raises:
        ConfigError: no engine has this name.
    """
    row = find_engine(name)
    if row is None:
        raise ConfigError(
            f"engine.name: expected one of {', '.join(engine_names())}, or {IMPORT_PATH_FORM} of an"
            f" engine of your own; found {name!r}"
        )
    return row


def engine_names() -> tuple[str, ...]:
    """Names of the table."""
    return tuple(row.name for row in TABLE)


@cache
def own_settings() -> Mapping[str, tuple[type[EngineSettings], ...]]:
    """Setting -> the models of the engines that have one of this name."""
    owners: dict[str, tuple[type[EngineSettings], ...]] = {}
    for row in TABLE:
        for setting in row.settings.model_fields:
            owners[setting] = (*owners.get(setting, ()), row.settings)
    return owners
