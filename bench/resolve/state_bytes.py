"""Bytes that a run must hold at its optimizer step: weights, gradients and optimizer state.

For mfsdp from the core's own model of memory, exact, padding included; for torch's engines from
what they keep: weights, gradients and moments in the dtype of the main weights, on whole parameters
(single, ddp), on the equal dim-0 chunks of `fully_shard` (the first rank has the largest), or on
equal parts of flat parameters (fsdp1, a lower bound).
Pools of buffers are counted, planned as the core plans them. Activations, weights that are gathered
and communication buffers outside of pools come on top and are not, so a machine with less memory
cannot run it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import NamedTuple

from bench.resolve.engine_rules import codec_of, core_settings
from bench.resolve.parameter_facts import TORCH_NAMES, parameter_facts
from bench.spec import (
    EngineSpec,
    MfsdpSettings,
    ModelShape,
    ResolvedDtypes,
    ResolvedRun,
    StrategyName,
    TrainSpec,
    known_engine,
)
from mfsdp_core.plan.allocation import AllocationConfig
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.dtype_policy import ELEMENT_BYTES
from mfsdp_core.plan.grouping import BucketPlan, plan_buckets
from mfsdp_core.plan.memory_model import (
    ADAM,
    SGD,
    OptimizerFacts,
    PolicyNames,
    memory_of_buckets,
)
from mfsdp_core.plan.recipes import QuantisedWeights
from mfsdp_core.plan.strategy import INNER, parse_strategy


class _Facts(NamedTuple):
    """What the bytes depend on: cells of a sweep that agree in it share one answer."""

    shape: ModelShape
    engine: EngineSpec
    strategy: StrategyName
    dtypes: ResolvedDtypes
    optimizer: OptimizerFacts
    ranks: int

    @classmethod
    def of(cls, run: ResolvedRun) -> _Facts | None:
        """Those of `run`; None where its model is the user's own."""
        if run.shape is None:
            return None
        optimizer = _optimizer(run.train)
        return cls(run.shape, run.engine, run.strategy, run.dtypes, optimizer, run.launch.ranks)


def state_bytes_of_all_ranks(run: ResolvedRun) -> int | None:
    """Sum over the ranks of `run`; None where nobody knows its model, or what its engine keeps."""
    facts = _Facts.of(run)
    if facts is None or known_engine(run.engine.name).state is None:
        return None
    return _sum_over_ranks(facts)


@lru_cache(maxsize=4096)
def _sum_over_ranks(facts: _Facts) -> int:
    return sum(sum(_by_category(facts, rank).values()) for rank in range(facts.ranks))


def state_bytes_by_category(run: ResolvedRun, rank: int = 0) -> dict[str, int]:
    """Bytes of one rank in the categories of the memory ledger. Rank 0 has no less than others.

    Empty where nobody knows the model, or what the engine keeps.
    """
    facts = _Facts.of(run)
    return {} if facts is None else _by_category(facts, rank)


def _by_category(facts: _Facts, rank: int) -> dict[str, int]:
    return _MODELS[known_engine(facts.engine.name).state](facts, rank)


def _optimizer(train: TrainSpec) -> OptimizerFacts:
    if train.optimizer == "precision_aware_adamw":
        # It counts its steps in Python.
        state_dtype = TORCH_NAMES[train.state_dtype]
        return OptimizerFacts(
            2, 0, state_dtype, train.master_weights, remainders=train.store_remainders
        )
    return ADAM if train.optimizer == "adamw" else SGD


def _core_bytes(run: _Facts, rank: int) -> dict[str, int]:
    settings = core_settings(run.engine) or MfsdpSettings()
    strategy = parse_strategy(run.strategy, run.engine.outer_strategy)
    inner_size = run.ranks // run.engine.outer_size
    coordinate = Coordinate(
        inner_rank=rank % inner_size,
        inner_size=inner_size,
        outer_rank=rank // inner_size,
        outer_size=run.engine.outer_size,
        has_outer_axis=run.engine.outer_size > 1,
    )
    dtypes = run.dtypes
    codec = codec_of(run.engine)
    model = memory_of_buckets(
        bucket_plans(run.shape, dtypes.compute, coordinate.sub_shards(strategy), codec),
        strategy,
        coordinate,
        PolicyNames(
            None if dtypes.main_params is None else TORCH_NAMES[dtypes.main_params],
            TORCH_NAMES[dtypes.main_grads],
            TORCH_NAMES[dtypes.grad_comm],
            settings.decoupled_grad,
        ),
        optimizer=run.optimizer,
        gradients_attached=True,
        allocation=AllocationConfig(settings.allocator, settings.pool_slots),
        codec=codec,
    )
    return {name: count for name, count in model.bytes_by_category().items() if count}


@lru_cache(maxsize=32)
def bucket_plans(
    shape: ModelShape, compute: str, slices: int, codec: QuantisedWeights | None
) -> tuple[BucketPlan, ...]:
    """The buckets of the core. compute: bench's name of a dtype."""
    return tuple(plan_buckets(parameter_facts(shape, compute), slices, codec=codec))


def _torch_bytes(run: _Facts, rank: int) -> dict[str, int]:
    facts = parameter_facts(run.shape, run.dtypes.compute)
    ranks = run.ranks if INNER[run.strategy].shards_optimizer else 1
    elements = sum(_chunk_elements(fact.shape, rank % ranks, ranks) for fact in facts)
    return _bytes_of_elements(run, elements, len(facts))


def _flat_bytes(run: _Facts, _rank: int) -> dict[str, int]:
    """No less than this, for equal parts of flat parameters: without their padding and counters."""
    inner = run.ranks // run.engine.outer_size
    ranks = inner if INNER[run.strategy].shards_optimizer else 1
    return _bytes_of_elements(run, run.shape.parameters // ranks, 0)


def _bytes_of_elements(run: _Facts, elements: int, tensors: int) -> dict[str, int]:
    """Weights, gradients and state of `elements`, which a rank holds of `tensors` parameters."""
    main = TORCH_NAMES[run.dtypes.main_params or run.dtypes.compute]
    weights = elements * ELEMENT_BYTES[main]
    optimizer = run.optimizer
    state = optimizer.moments * elements * ELEMENT_BYTES[optimizer.state_dtype or main]
    state += optimizer.counters * tensors * ELEMENT_BYTES["float32"]
    if optimizer.master_weights:
        state += elements * max(ELEMENT_BYTES[main], ELEMENT_BYTES["float32"])
    if optimizer.remainders:
        state += elements * ELEMENT_BYTES["int16"]
    found = {"main_weights": weights, "gradients": weights, "optimizer_state": state}
    return {name: count for name, count in found.items() if count}


def _chunk_elements(shape: tuple[int, ...], rank: int, ranks: int) -> int:
    """Elements of the rank's chunk of dim 0: ceil(rows / ranks) rows, the last ranks fewer."""
    each = -(-shape[0] // ranks)
    rows = max(0, min(shape[0], (rank + 1) * each) - rank * each)
    return rows * prod(shape[1:])


def _unknown_bytes(_run: _Facts, _rank: int) -> dict[str, int]:
    return {}


#: By `EngineRow.state`.
_MODELS: dict[str | None, Callable[[_Facts, int], dict[str, int]]] = {
    "core": _core_bytes,
    "torch": _torch_bytes,
    "flat": _flat_bytes,
    None: _unknown_bytes,
}
