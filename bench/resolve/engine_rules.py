"""Rules about engines: what the row of each says it offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from bench.errors import ConfigError
from bench.resolve.import_path import locate, problem_of
from bench.resolve.machine import Machine
from bench.spec import (
    SHARDED,
    EngineSpec,
    MegatronFsdpSettings,
    MfsdpSettings,
    ResolvedRun,
    RunSpec,
    TrainSpec,
    engine_rows,
    known_engine,
)
from bench.spec.engine_table import TABLE
from mfsdp_core.plan.recipes import QuantisedWeights, gathers_by_module
from mfsdp_core.plan.strategy import INNER, OUTER, AxisPlacements

#: Optimizers with moments of a dtype of their own, which read decoupled gradients.
PRECISION_AWARE: Final = ("precision_aware_adamw", "fused_adam")
_PRECISION_AWARE_NAMES: Final = " or ".join(PRECISION_AWARE)
#: Package and extra of optimizers that are not torch's or this project's.
_PACKAGES: Final = {
    "fused_adam": ("transformer_engine", "gpu"),
    "adamw_8bit": ("torchao", "fp8"),
    "adamw_fp8": ("torchao", "fp8"),
}


def core_settings(engine: EngineSpec) -> MfsdpSettings | None:
    """The settings of `engine` where it is this project's own; None for any other."""
    # Not a subclass: an engine given by its import path has the same switches, but other rules.
    return engine.settings if type(engine.settings) is MfsdpSettings else None


def codec_of(engine: EngineSpec) -> QuantisedWeights | None:
    """How the core's weights are quantised on their way; None where they are not."""
    settings = core_settings(engine)
    if settings is None or settings.recipe == "none":
        return None
    codec = QuantisedWeights(settings.recipe)
    # With two directions there is one way; `gather_precision_without_recipe` says so.
    return codec if codec.has_two_directions else replace(codec, gathers=settings.gather_precision)


def resolve_engine(spec: RunSpec) -> EngineSpec:
    """The engine with its strategy and its way of gathering chosen.

    Raises:
        ConfigError: nobody offers an engine of this name, or its transport is gone.
    """
    if spec.engine.asked("transport") == "same_host":
        raise ConfigError(
            "engine.transport: same_host is gone, and its runs can only be read; leave it out, or"
            " write native or point_to_point"
        )
    row = known_engine(spec.engine.name)
    strategy = spec.engine.strategy or row.strategies[0]
    engine = spec.engine.model_copy(update={"strategy": strategy})
    settings = core_settings(engine)
    if settings is None or settings.fine_grained_gather is not None:
        return engine
    recomputes = spec.model.recompute != "none"
    model = spec.model
    weights: str = settings.recipe
    if model.linear == "transformer_engine" and model.quantised_weights and model.linear_recipe:
        weights = model.linear_recipe
    by_module = gathers_by_module(weights, recomputes=recomputes)
    return engine.with_settings(fine_grained_gather=by_module)


def engine_not_here(run: ResolvedRun, machine: Machine) -> str | None:
    """The engine's own code, and what it needs, must be installed for this interpreter."""
    if machine.described:
        return None
    return _why_not_here(run.engine.name, Path.cwd()) or _optimizer_not_here(run.train.optimizer)


def _optimizer_not_here(name: str) -> str | None:
    """The package that an optimizer comes from must be installed for this interpreter."""
    package, extra = _PACKAGES.get(name, ("torch", ""))
    if locate(package) is not None:
        return None
    return (
        f"the optimizer {name} needs {package}, which is not installed here: pip install"
        f" 'mfsdp-bench[{extra}]'"
    )


def fused_adam_needs_cuda(run: ResolvedRun, _machine: Machine) -> str | None:
    """Its kernels are Transformer Engine's."""
    if run.train.optimizer != "fused_adam":
        return None
    if run.launch.device != "cuda":
        return (
            f"fused_adam computes on CUDA; found device {run.launch.device}: set train.optimizer to"
            " precision_aware_adamw"
        )
    if run.train.state_dtype == "fp64":
        return "fused_adam has no moments in fp64: set train.state_dtype to fp32, bf16 or fp16"
    return None


@lru_cache(maxsize=256)
def _why_not_here(engine: str, _folder: Path) -> str | None:
    """As `engine_not_here`, for a user who stands in `folder`."""
    row = known_engine(engine)
    missing = [name for name in row.needs if locate(name) is None]
    if missing:
        remedy = f": {row.install}" if row.install else ""
        what = " and ".join(missing)
        return f"engine {row.name} needs {what}, which is not installed here{remedy}"
    found = None if row in TABLE else problem_of(row.factory)
    return None if found is None else f"engine {row.name} cannot be loaded: {found}"


def engine_not_on_device(run: ResolvedRun, machine: Machine) -> str | None:
    """Some engines know one kind of device only."""
    row, device = known_engine(run.engine.name), run.launch.device
    if device in row.devices:
        return None
    absent = engine_not_here(run, machine)
    return f"engine {row.name} runs on {' and '.join(row.devices)}; found device {device}" + (
        f"; and {absent}" if absent else ""
    )


def strategy_not_in_engine(run: ResolvedRun, _machine: Machine) -> str | None:
    """An engine is asked for a sharding that it does not have."""
    name, strategy, outer = run.engine.name, run.strategy, run.engine.outer_strategy
    row = known_engine(name)
    if strategy not in row.strategies:
        return f"engine {name} offers the strategy {' and '.join(row.strategies)}, not {strategy}"
    if run.engine.outer_size == 1 or row.hybrids is None or (strategy, outer) in row.hybrids:
        return None
    pairs = " or ".join(f"{inner} with {over}" for inner, over in row.hybrids)
    return (
        f"engine {name} offers {pairs} (strategy with outer_strategy) on two axes, not {strategy}"
        f" with {outer}"
    )


def single_has_one_rank(run: ResolvedRun, _machine: Machine) -> str | None:
    """`single` has no communication, so a second rank would repeat the first."""
    if not known_engine(run.engine.name).one_process or run.launch.ranks == 1:
        return None
    return (
        f"engine {run.engine.name} is one process that consumes the whole global batch; found"
        f" {run.launch.ranks} ranks: set launch.ranks to 1 in its cells"
    )


def switch_not_in_engine(run: ResolvedRun, _machine: Machine) -> str | None:
    """Another engine's switch would be ignored, and the cell mislabelled."""
    engine = run.engine
    asked = [f"{switch}={value}" for switch, value in engine.foreign]
    owners = {
        row.name
        for row in engine_rows()
        for switch, _ in engine.foreign
        if switch in row.settings.model_fields
    }
    if not known_engine(engine.name).outer_axis:
        outer = [(name, getattr(engine, name)) for name in ("outer_strategy", "outer_size")]
        defaults = EngineSpec()
        found = [f"{name}={value}" for name, value in outer if value != getattr(defaults, name)]
        asked = found + asked
        owners |= {row.name for row in engine_rows() if found and row.outer_axis}
    if not asked:
        return None
    return (
        f"engine {engine.name} has no {', '.join(asked)}: these are switches of"
        f" {' and '.join(sorted(owners))}"
    )


def outer_strategy_needs_outer_axis(run: ResolvedRun, _machine: Machine) -> str | None:
    """Without an outer axis there is nothing for the outer strategy to shard over."""
    outer = run.engine.outer_strategy
    if not OUTER[outer].shards_optimizer or run.engine.outer_size > 1:
        return None
    return (
        f"outer_strategy {outer} shards over an outer axis, and outer_size is 1: set outer_size to"
        " a divisor of the ranks above 1, or outer_strategy to no_shard"
    )


def outer_needs_inner_sharding(run: ResolvedRun, _machine: Machine) -> str | None:
    """Sharding the optimizer over the outer axis refines the inner shards; there must be some."""
    if (
        not OUTER[run.engine.outer_strategy].shards_optimizer
        or INNER[run.strategy].shards_optimizer
    ):
        return None
    return (
        f"outer_strategy {run.engine.outer_strategy} cuts the inner optimizer shards further, and"
        f" the strategy {run.strategy} has none: use {_those(lambda row: row.shards_optimizer)}"
    )


def outer_axis_leaves_ranks_to_shard(run: ResolvedRun, _machine: Machine) -> str | None:
    """Of one rank to shard over torch's engines make something else than of several."""
    engine = run.engine
    shards = engine.outer_size < run.data_parallel or engine.outer_size == 1
    if shards or known_engine(engine.name).name not in ("fsdp1", "fsdp2"):
        return None
    return (
        f"outer_size {engine.outer_size} leaves {engine.name} one rank to shard over: choose a"
        " smaller divisor of the ranks, or the engine ddp, which replicates"
    )


def no_overlap_needs_whole_gradients(run: ResolvedRun, _machine: Machine) -> str | None:
    """Where gradients are sharded, each microbatch must be reduced before the next one."""
    settings = core_settings(run.engine)
    if settings is None or settings.overlap_grad_reduce:
        return None
    if not INNER[run.strategy].reduces_every_microbatch:
        return None
    whole = _those(lambda row: not row.reduces_every_microbatch)
    return (
        f"overlap_grad_reduce=False reduces once, at the end of a step, from whole gradients; the"
        f" strategy {run.strategy} keeps only a shard of them: use {whole}"
    )


def resharding_to_a_part(run: ResolvedRun, _machine: Machine) -> str | None:
    """`reshard_after_forward` as a number is a way of ZeRO-3, and cuts the ranks evenly."""
    size = run.engine.setting("reshard_after_forward")
    ranks = run.data_parallel // run.engine.outer_size
    if size is None or ("weights" in SHARDED[run.strategy] and size < ranks and ranks % size == 0):
        return None
    return (
        "reshard_after_forward wants the strategy optim_grads_params and a divisor of its ranks"
        f" between 1 and all of them; found {size} with {run.strategy} on {ranks} ranks: set it to"
        " null, or to such a divisor"
    )


def decoupled_gradients_need_a_reader(run: ResolvedRun, _machine: Machine) -> str | None:
    """Other optimizers read `grad`, which stays None, and would leave the weights as they are."""
    settings = run.engine.settings
    if core_settings(run.engine) is None and not isinstance(settings, MegatronFsdpSettings):
        return None
    if not run.engine.setting("decoupled_grad") or run.train.optimizer in PRECISION_AWARE:
        return None
    return (
        f"decoupled_grad leaves grad empty, which {run.train.optimizer} reads: set train.optimizer"
        f" to {_PRECISION_AWARE_NAMES}, or decoupled_grad to false"
    )


def _those(wanted: Callable[[AxisPlacements], bool]) -> str:
    """The strategies that are meant, as `no_shard or optim`."""
    names = [name for name, row in INNER.items() if wanted(row)]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def optimizer_has_no_such_state(run: ResolvedRun, _machine: Machine) -> str | None:
    """Moments of another dtype and a copy of the weights exist in few optimizers only."""
    train, defaults = run.train, TrainSpec()
    changed = [
        f"{setting}={getattr(train, setting)}"
        for setting in ("state_dtype", "master_weights", "store_remainders")
        if getattr(train, setting) != getattr(defaults, setting)
    ]
    if not changed or train.optimizer in PRECISION_AWARE:
        return None
    return (
        f"the optimizer {train.optimizer} has no {', '.join(changed)}: set train.optimizer to"
        f" {_PRECISION_AWARE_NAMES}, or leave them at their defaults"
    )


def remainders_need_bf16_weights(run: ResolvedRun, _machine: Machine) -> str | None:
    """What a weight lacks to FP32 exists for narrower weights, and once."""
    main = run.dtypes.main_params or run.dtypes.compute
    if not run.train.store_remainders or (main == "bf16" and not run.train.master_weights):
        return None
    if run.train.master_weights:
        return (
            "store_remainders and master_weights are two ways to keep the same weights in FP32,"
            " which would be kept twice: set one of them"
        )
    return (
        "store_remainders keeps what BF16 main weights lack to FP32; found main_params"
        f" {main}: set dtypes.main_params to bf16"
    )
