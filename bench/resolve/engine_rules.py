"""Rules about engines: what the row of each says that it offers, and which settings go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

from bench.resolve.engine_choice import (
    PRECISION_AWARE,
    changed_settings,
    core_settings,
    core_switches,
)
from bench.resolve.import_path import locate, problem_of
from bench.resolve.machine import Machine
from bench.spec import (
    POOLS,
    SHARDED,
    EngineSpec,
    MegatronFsdpSettings,
    ResolvedRun,
    TrainSpec,
    known_engine,
)
from bench.spec.engine_table import TABLE
from mfsdp_core.plan.strategy import INNER, OUTER, AxisPlacements

_PRECISION_AWARE_NAMES: Final = " or ".join(PRECISION_AWARE)
#: Package and extra of optimizers that are not torch's or this project's.
_PACKAGES: Final = {"fused_adam": ("transformer_engine", "gpu")}


def offers(run: ResolvedRun, machine: Machine) -> Iterator[tuple[str, str]]:
    """Device, ranks, strategies and switches, as the row of the engine has them."""
    engine, row, device = run.engine, run.engine.known_row, run.launch.device
    if reason := _strategy_not_offered(run):
        yield "strategy-not-in-engine", reason
    if device not in row.devices:
        absent = _not_here(run, machine)
        yield (
            "engine-not-on-device",
            f"engine {row.name} runs on {' and '.join(row.devices)}; found device {device}"
            + (f"; and {absent}" if absent else ""),
        )
    if row.one_process and run.launch.ranks > 1:
        yield (
            "single-has-one-rank",
            f"engine {engine.name} is one process that consumes the whole global batch; found"
            f" {run.launch.ranks} ranks: set launch.ranks to 1 in its cells",
        )
    if reason := _switch_not_offered(engine):
        yield "switch-not-in-engine", reason


def _strategy_not_offered(run: ResolvedRun) -> str | None:
    """A sharding that the engine does not have."""
    row, strategy, outer = run.engine.known_row, run.strategy, run.engine.outer_strategy
    if strategy not in row.strategies:
        return (
            f"engine {row.name} offers the strategy {' and '.join(row.strategies)}, not {strategy}"
        )
    if run.engine.outer_size == 1 or row.hybrids is None or (strategy, outer) in row.hybrids:
        return None
    pairs = " or ".join(f"{inner} with {over}" for inner, over in row.hybrids)
    return (
        f"engine {row.name} offers {pairs} (strategy with outer_strategy) on two axes, not"
        f" {strategy} with {outer}"
    )


def _switch_not_offered(engine: EngineSpec) -> str | None:
    """Another engine's switch, which would be ignored, and the cell mislabelled."""
    unknown = [f"{switch}={value}" for switch, value in engine.foreign]
    owners = {
        row.name
        for row in TABLE
        for switch, _ in engine.foreign
        if switch in row.settings.model_fields
    }
    if not engine.known_row.outer_axis:
        changed = changed_settings(engine, EngineSpec(), "outer_strategy", "outer_size")
        unknown = changed + unknown
        owners |= {row.name for row in TABLE if changed and row.outer_axis}
    if not unknown:
        return None
    says = f"engine {engine.known_row.name} has no {', '.join(unknown)}: "
    if engine.name in owners:  # behind its other front
        names = " and ".join(f"engine.{switch}" for switch, _ in engine.foreign)
        return f"{says}drop {names}, or engine.front={engine.setting('front')}"
    return f"{says}these are switches of {' and '.join(sorted(owners))}"


def megatron_package(run: ResolvedRun, machine: Machine) -> Iterator[tuple[str, str]]:
    """What megatron-fsdp cannot do, though it has the switch."""
    settings, package = run.engine.settings, "megatron-fsdp 0.6.1"
    if not isinstance(settings, MegatronFsdpSettings):
        return
    if settings.allocator == "temporary":
        yield (
            "megatron-fsdp-lacks",
            f"{package} resizes storages, or serves units from pools; found allocator temporary:"
            f" use storage_resize, {' or '.join(POOLS)}",
        )
    if settings.average_in_collective:
        yield (
            "megatron-fsdp-lacks",
            f"{package} averages in collectives only with a mesh of experts; found"
            " average_in_collective=True: set it to false",
        )
    main = run.dtypes.main_params
    if run.linear.quantised_weights and (main is None or "weights" not in SHARDED[run.strategy]):
        yield (
            "megatron-fsdp-lacks",
            f"{package} encodes weights from main weights under optim_grads_params alone; found"
            f" {run.strategy} with main_params {main or 'none'}: set them, or"
            " model.quantised_weights to false",
        )
    needed = "megatron.core.nccl_allocator"
    if settings.nccl_ub and not machine.described and locate(needed) is None:
        yield (
            "engine-not-here",
            f"{package} takes user buffers from {needed}, which is not installed here: pip install"
            " --no-deps megatron-core, or set engine.nccl_ub to false",
        )


def outer_axis(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """What an outer axis needs, and what sharding the optimizer over it needs."""
    engine, outer = run.engine, run.engine.outer_strategy
    if OUTER[outer].shards_optimizer and engine.outer_size == 1:
        yield (
            "outer-strategy-needs-outer-axis",
            f"outer_strategy {outer} shards over an outer axis, and outer_size is 1: set outer_size"
            " to a divisor of the ranks above 1, or outer_strategy to no_shard",
        )
    # It refines the inner shards, so there must be some.
    if OUTER[outer].shards_optimizer and not INNER[run.strategy].shards_optimizer:
        yield (
            "outer-needs-inner-sharding",
            f"outer_strategy {outer} cuts the inner optimizer shards further, and the strategy"
            f" {run.strategy} has none: use {_those(lambda row: row.shards_optimizer)}",
        )
    # With one rank to shard over, torch's engines do something else than with several.
    if 1 < engine.outer_size == run.data_parallel and engine.name == "fsdp2":
        yield (
            "outer-axis-leaves-ranks-to-shard",
            f"outer_size {engine.outer_size} leaves {engine.name} one rank to shard over: choose a"
            " smaller divisor of the ranks, or the engine ddp, which replicates",
        )


def other_axes(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """Tensor and expert parallelism: which engines have them, and models that they cut evenly."""
    row = run.engine.known_row
    for name in ("tensor_parallel", "expert_parallel"):
        size = run.engine.setting(name)
        if size > 1 and name not in row.parallel:
            yield (
                "parallelism-not-in-engine",
                f"engine {row.name} has no {name}={size}: leave it at 1 in its cells",
            )
    if reason := _uneven_tensors(run):
        yield "tensor-parallel-cuts-evenly", reason
    if reason := _uneven_experts(run):
        yield "expert-parallel-spreads-evenly", reason


def _uneven_tensors(run: ResolvedRun) -> str | None:
    """Every rank of a group computes as much of a layer as the others."""
    size, shape = run.engine.tensor_parallel, run.shape
    if size == 1:
        return None
    if shape is None or shape.hybrid is not None:
        what = "a model of the user's own" if shape is None else f"the hybrid {shape.preset}"
        return f"tensor_parallel={size} cuts the layers of a Llama; found {what}"
    uneven = [
        f"{name} {getattr(shape, name)}"
        for name in ("heads", "kv_heads", "ffn_hidden", "vocab")
        if getattr(shape, name) % size
    ]
    if not uneven:
        return None
    return (
        f"tensor_parallel={size} gives each rank as many heads, channels and tokens of the"
        f" vocabulary as the others; found {', '.join(uneven)}: choose a divisor"
    )


def _uneven_experts(run: ResolvedRun) -> str | None:
    """Every rank of a group holds as many experts as the others."""
    size = run.engine.expert_parallel
    hybrid = None if run.shape is None else run.shape.hybrid
    if size == 1:
        return None
    if run.engine.tensor_parallel > 1:
        return f"expert_parallel={size} besides tensor_parallel is not built: set one of them to 1"
    if hybrid is None or "E" not in hybrid.pattern:
        return f"expert_parallel={size} spreads experts over ranks; found a model without any"
    if hybrid.experts % size:
        return (
            f"expert_parallel={size} gives each rank as many experts as the others; found"
            f" {hybrid.experts}: choose a divisor of it"
        )
    return None


def schedule(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """When gradients are reduced, and what of the weights is kept between the passes."""
    inner, engine = INNER[run.strategy], run.engine
    if not core_switches(engine).overlap_grad_reduce and inner.reduces_every_microbatch:
        able = _those(lambda row: not row.reduces_every_microbatch)
        yield (
            "no-overlap-needs-whole-gradients",
            "overlap_grad_reduce=False reduces once, at the end of a step, from whole gradients;"
            f" the strategy {run.strategy} keeps only a shard of them: use {able}",
        )
    size, ranks = engine.setting("reshard_after_forward"), run.data_parallel // engine.outer_size
    gathers_again = "weights" in SHARDED[run.strategy]
    if size is not None and not (gathers_again and size < ranks and ranks % size == 0):
        yield (
            "resharding-to-a-part",
            "reshard_after_forward wants the strategy optim_grads_params and a divisor of its"
            f" ranks between 1 and all of them; found {size} with {run.strategy} on {ranks} ranks:"
            " set it to null, or to such a divisor",
        )


def optimizers(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """Which optimizer reads which gradients, and keeps which state."""
    engine, train, main = run.engine, run.train, run.dtypes.main_params or run.dtypes.compute
    known = core_settings(engine) is not None or isinstance(engine.settings, MegatronFsdpSettings)
    # Other optimizers read `grad`, which stays None, and would leave the weights as they are.
    if known and engine.setting("decoupled_grad") and train.optimizer not in PRECISION_AWARE:
        yield (
            "decoupled-gradients-need-a-reader",
            f"decoupled_grad leaves grad empty, which {train.optimizer} reads: set train.optimizer"
            f" to {_PRECISION_AWARE_NAMES}, or decoupled_grad to false",
        )
    if train.optimizer == "fused_adam" and run.launch.device != "cuda":
        yield (
            "fused-adam-needs-cuda",
            f"fused_adam computes on CUDA; found device {run.launch.device}: set train.optimizer to"
            " precision_aware_adamw",
        )
    elif train.optimizer == "fused_adam" and train.state_dtype == "fp64":
        yield (
            "fused-adam-needs-cuda",
            "fused_adam has no moments in fp64: set train.state_dtype to fp32, bf16 or fp16",
        )
    names = ("state_dtype", "master_weights", "store_remainders")
    changed = changed_settings(train, TrainSpec(), *names)
    if changed and train.optimizer not in PRECISION_AWARE:
        yield (
            "optimizer-has-no-such-state",
            f"the optimizer {train.optimizer} has no {', '.join(changed)}: set train.optimizer to"
            f" {_PRECISION_AWARE_NAMES}, or leave them at their defaults",
        )
    if reason := _no_whole_matrices(run):
        yield "optimizer-needs-whole-matrices", reason
    if train.store_remainders and train.master_weights:
        yield (
            "remainders-need-bf16-weights",
            "store_remainders and master_weights are two ways to keep the same weights in FP32,"
            " which would be kept twice: set one of them",
        )
    elif train.store_remainders and main != "bf16":
        yield (
            "remainders-need-bf16-weights",
            "store_remainders keeps what BF16 main weights lack to FP32; found main_params"
            f" {main}: set dtypes.main_params to bf16",
        )


def _no_whole_matrices(run: ResolvedRun) -> str | None:
    """Why an optimizer cannot step on whole matrices, where it has to."""
    engine, is_muon = run.engine, run.train.optimizer == "muon"
    if not is_muon and engine.setting("matrices") != "whole":
        return None
    what = "train.optimizer=muon" if is_muon else "engine.matrices=whole"
    if not engine.known_row.whole_matrices:
        able = [row.name for row in TABLE if row.whole_matrices]
        change = f"use {' or '.join(able)}"
        if engine.name in able:  # behind its other front
            change = f"drop {what} or engine.front={engine.setting('front')}"
        return (
            f"{what} needs whole matrices, and engine {engine.known_row.name} is not known to give"
            f" its optimizer any: {change}"
        )
    if engine.tensor_parallel > 1:
        return f"{what}: tensor parallelism cuts matrices as well: set engine.tensor_parallel to 1"
    if not is_muon and not INNER[run.strategy].shards_optimizer:
        return f"{what}: {run.strategy} has whole matrices anyway: leave it out"
    if engine.setting("decoupled_grad"):
        return f"{what} reads grad, which decoupled_grad leaves empty: set it to false"
    return None


def _those(wanted: Callable[[AxisPlacements], bool]) -> str:
    """The strategies that are meant, as `no_shard or optim`."""
    names = [name for name, row in INNER.items() if wanted(row)]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def installed(run: ResolvedRun, machine: Machine) -> Iterator[tuple[str, str]]:
    """Code of the engine and of the optimizer must be there for this interpreter."""
    if reason := _not_here(run, machine):
        yield "engine-not-here", reason


def _not_here(run: ResolvedRun, machine: Machine) -> str | None:
    if machine.described:
        return None
    return _why_not_here(run.engine.name, Path.cwd()) or _optimizer_not_here(run.train.optimizer)


def _optimizer_not_here(name: str) -> str | None:
    package, extra = _PACKAGES.get(name, ("torch", ""))
    if locate(package) is not None:
        return None
    return (
        f"the optimizer {name} needs {package}, which is not installed here: pip install"
        f" 'mfsdp-bench[{extra}]'"
    )


@lru_cache(maxsize=256)
def _why_not_here(engine: str, _folder: Path) -> str | None:
    """Why the engine is not here, for a user who stands in `folder`."""
    row = known_engine(engine)
    missing = [name for name in row.needs if locate(name) is None]
    if missing:
        remedy = f": {row.install}" if row.install else ""
        what = " and ".join(missing)
        return f"engine {row.name} needs {what}, which is not installed here{remedy}"
    if other := row.other_release():
        return other
    problem = None if row in TABLE else problem_of(row.factory)
    return None if problem is None else f"engine {row.name} cannot be loaded: {problem}"
