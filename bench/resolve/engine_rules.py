"""Rules about engines: what they offer, and what of mfsdp_core exists so far."""

from __future__ import annotations

from bench.resolve.machine import Machine
from bench.spec import (
    EngineName,
    EngineSpec,
    ResolvedDtypes,
    ResolvedRun,
    RunSpec,
    StrategyName,
    TrainSpec,
)
from mfsdp_core.plan.fine_grained import gathers_by_module

DEFAULT_STRATEGY: dict[EngineName, StrategyName] = {
    "single": "no_shard",
    "ddp": "no_shard",
    "fsdp2": "optim_grads_params",
    "mfsdp": "optim_grads_params",
}

_STRATEGIES: dict[EngineName, tuple[StrategyName, ...]] = {
    "single": ("no_shard",),
    "ddp": ("no_shard",),
    # reshard_after_forward False and True.
    "fsdp2": ("optim_grads", "optim_grads_params"),
    "mfsdp": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
}

# Everything of EngineSpec that only mfsdp reads.
_SWITCHES = (
    "outer_strategy",
    "outer_size",
    "allocator",
    "overlap_param_gather",
    "overlap_grad_reduce",
    "nccl_ub",
    "double_buffer",
    "average_in_collective",
    "transport",
    "decoupled_grad",
    "pool_slots",
    "separate_gather_group",
    "fine_grained_gather",
)


def resolve_engine(spec: RunSpec, dtypes: ResolvedDtypes) -> EngineSpec:
    """The engine with its strategy and its way of gathering chosen."""
    engine = spec.engine
    chosen: dict[str, object] = {"strategy": engine.strategy or DEFAULT_STRATEGY[engine.name]}
    if engine.name == "mfsdp" and engine.fine_grained_gather is None:
        recomputes = spec.model.recompute != "none"
        chosen["fine_grained_gather"] = gathers_by_module(dtypes.compute, recomputes=recomputes)
    return engine.model_copy(update=chosen)


def strategy_not_in_engine(run: ResolvedRun, _machine: Machine) -> str | None:
    """An engine is asked for a sharding that it does not have."""
    name, strategy = run.engine.name, run.strategy
    offered = _STRATEGIES[name]
    if strategy in offered:
        return None
    return f"engine {name} offers the strategy {' and '.join(offered)}, not {strategy}"


def single_has_one_rank(run: ResolvedRun, _machine: Machine) -> str | None:
    """`single` has no communication, so a second rank would repeat the first."""
    if run.engine.name != "single" or run.launch.ranks == 1:
        return None
    return (
        f"engine single is one process that consumes the whole global batch; found"
        f" {run.launch.ranks} ranks: set launch.ranks to 1 in its cells"
    )


def switch_not_in_engine(run: ResolvedRun, _machine: Machine) -> str | None:
    """A switch of mfsdp on another engine would be ignored, and the cell mislabelled."""
    if run.engine.name == "mfsdp":
        return None
    defaults = EngineSpec()
    changed = [
        f"{switch}={getattr(run.engine, switch)}"
        for switch in _SWITCHES
        if getattr(run.engine, switch) != getattr(defaults, switch)
    ]
    if not changed:
        return None
    return f"engine {run.engine.name} has no {', '.join(changed)}: these are switches of mfsdp"


def outer_strategy_needs_outer_axis(run: ResolvedRun, _machine: Machine) -> str | None:
    """Without an outer axis there is nothing for the outer strategy to shard over."""
    if run.engine.outer_strategy == "no_shard" or run.engine.outer_size > 1:
        return None
    return (
        "outer_strategy optim shards over an outer axis, and outer_size is 1: set outer_size to a"
        " divisor of the ranks above 1, or outer_strategy to no_shard"
    )


def outer_needs_inner_sharding(run: ResolvedRun, _machine: Machine) -> str | None:
    """Sharding the optimizer over the outer axis refines the inner shards; there must be some."""
    if run.engine.outer_strategy == "no_shard" or run.strategy != "no_shard":
        return None
    return (
        "outer_strategy optim cuts the inner optimizer shards further, and the strategy no_shard"
        " has none: use optim, optim_grads or optim_grads_params"
    )


def no_overlap_needs_whole_gradients(run: ResolvedRun, _machine: Machine) -> str | None:
    """Where gradients are sharded, each microbatch must be reduced before the next one."""
    if run.engine.name != "mfsdp" or run.engine.overlap_grad_reduce:
        return None
    if run.strategy in {"no_shard", "optim"}:
        return None
    return (
        f"overlap_grad_reduce=False reduces once, at the end of a step, from whole gradients; the"
        f" strategy {run.strategy} keeps only a shard of them: use no_shard or optim"
    )


def decoupled_gradients_need_a_reader(run: ResolvedRun, _machine: Machine) -> str | None:
    """Other optimizers read `grad`, which stays None, and would leave the weights as they are."""
    if not run.engine.decoupled_grad or run.train.optimizer == "precision_aware_adamw":
        return None
    return (
        f"decoupled_grad leaves grad empty, which {run.train.optimizer} reads: set train.optimizer"
        " to precision_aware_adamw, or decoupled_grad to false"
    )


def optimizer_has_no_such_state(run: ResolvedRun, _machine: Machine) -> str | None:
    """Moments of another dtype and a copy of the weights exist in one optimizer only."""
    train, defaults = run.train, TrainSpec()
    changed = [
        f"{setting}={getattr(train, setting)}"
        for setting in ("state_dtype", "master_weights")
        if getattr(train, setting) != getattr(defaults, setting)
    ]
    if not changed or train.optimizer == "precision_aware_adamw":
        return None
    return (
        f"the optimizer {train.optimizer} has no {', '.join(changed)}: set train.optimizer to"
        " precision_aware_adamw, or leave them at their defaults"
    )


def not_built(run: ResolvedRun, _machine: Machine) -> str | None:
    """Capabilities of the mfsdp engine that do not exist yet."""
    if run.engine.name != "mfsdp" or not run.engine.nccl_ub:
        return None
    return "mfsdp does not have NCCL user buffers (nccl_ub) yet"
