"""Bytes that a run must hold at its optimizer step (weights, gradients, optimizer state) or gather.

For mfsdp from the core's own model of memory, exact, padding included; for torch's engines from
what they keep: weights, gradients and moments in the dtype of the main weights, on whole parameters
(single, ddp), on the equal dim-0 chunks of `fully_shard` (the first rank has the largest), on equal
parts of flat parameters (fsdp1, a lower bound), or with moments of the whole parameters that a rank
owns (ddp_zero). Moments of codes count there without scales.
Pools of buffers are counted, planned as the core plans them. Activations, weights that are gathered
and communication buffers outside of pools come on top and are not, so a machine with less memory
cannot run it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple

from bench.resolve.engine_choice import PRECISION_AWARE, codec_of, core_settings, core_switches
from bench.resolve.parameter_facts import TORCH_NAMES, parameter_facts
from bench.spec import (
    SHARDED,
    EngineSpec,
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
from mfsdp_core.plan.grouping import BucketPlan, ParameterFacts, plan_buckets
from mfsdp_core.plan.memory_model import (
    ADAM,
    SGD,
    MomentCodes,
    OptimizerFacts,
    PolicyNames,
    memory_of_buckets,
)
from mfsdp_core.plan.strategy import INNER, parse_strategy

#: A table of 256 values for every moment of torchao's 8-bit optimizer.
_CODES: Final = {"adamw_8bit": MomentCodes(table=256), "adamw_fp8": MomentCodes()}


_LISTED_LAYERS: Final = 64


class _Facts(NamedTuple):
    """What the bytes depend on: cells of a sweep that agree in it share one answer."""

    shape: ModelShape
    engine: EngineSpec
    strategy: StrategyName
    dtypes: ResolvedDtypes
    optimizer: OptimizerFacts
    data_parallel: int

    @classmethod
    def of(cls, run: ResolvedRun) -> _Facts | None:
        """Those of `run`; None where its model is the user's own, or its layers keep codes."""
        if run.shape is None or run.linear.quantised_weights:
            return None
        optimizer = _optimizer(run.train)
        return cls(run.shape, run.engine, run.strategy, run.dtypes, optimizer, run.data_parallel)


def state_bytes_of_all_ranks(run: ResolvedRun) -> int | None:
    """Sum over the ranks of `run`; None if the model or the engine's memory is unknown."""
    facts = _Facts.of(run)
    if facts is None or known_engine(run.engine.name).state is None:
        return None
    return _sum_over_ranks(facts)


@lru_cache(maxsize=4096)
def _sum_over_ranks(facts: _Facts) -> int:
    ranks = range(facts.data_parallel)
    return facts.engine.tensor_parallel * sum(sum(_by_category(facts, r).values()) for r in ranks)


def state_bytes_by_category(run: ResolvedRun, rank: int = 0) -> dict[str, int]:
    """Bytes of one data-parallel rank in the categories of the memory ledger.

    Rank 0 has no less than others.

    Empty if the model or the engine's memory is unknown.
    """
    facts = _Facts.of(run)
    return {} if facts is None else _by_category(facts, rank)


def _by_category(facts: _Facts, rank: int) -> dict[str, int]:
    model = _MODELS[known_engine(facts.engine.name).state]
    if model is _whole_parameter_bytes:  # a layer more may lie on any rank
        return model(facts, rank)
    return _counted_layers(
        facts.shape, facts.engine, lambda shape: model(facts._replace(shape=shape), rank)
    )


def _counted_layers(
    shape: ModelShape, engine: EngineSpec, account: Callable[[ModelShape], dict[str, int]]
) -> dict[str, int]:
    """`account(shape)` of any number of layers, of which some are listed and the others counted.

    The layers of a Llama are alike, and each has buckets of its own. So every further one adds as
    much as the one before, once there are more of them than slots of a pool.
    """
    settings = core_switches(engine)
    few = max(_LISTED_LAYERS, settings.pool_slots + 1)
    if shape.hybrid is not None or shape.layers <= few + 1:
        return account(shape)
    some, one_more = (account(shape.model_copy(update={"layers": n})) for n in (few, few + 1))
    more = shape.layers - few
    return {name: size + more * (one_more[name] - size) for name, size in some.items()}


def gather_bytes(run: ResolvedRun) -> dict[str, int]:
    """Bytes of all weights as one gather for a forward pass has them, by torch's name of the dtype.

    Beside tensor or expert parallelism: of what one rank of such a group holds of them.

    Empty if the engine is not the core, the model is the user's own, or nothing is gathered. Every
    use of a unit gathers as much again, so gathers of a step are multiples of it.
    """
    if run.shape is None or core_settings(run.engine) is None or not SHARDED[run.strategy]:
        return {}
    if run.linear.quantised_weights:  # layers of others encode them
        return {}
    return _counted_layers(run.shape, run.engine, lambda shape: _gather_bytes(run, shape))


def _gather_bytes(run: ResolvedRun, shape: ModelShape) -> dict[str, int]:
    codec = codec_of(run.engine)
    found: Counter[str] = Counter()
    for plan in _bucket_plans(shape, run.dtypes.compute, run.engine, run.data_parallel):
        if codec is None or not plan.is_encoded:
            compute = TORCH_NAMES[run.dtypes.compute]
            found[compute] += plan.layout.total_elements * ELEMENT_BYTES[compute]
            continue
        for payload in codec.payloads(plan.layout, plan.dtype):
            if "forward" in payload.directions:
                size = payload.slice_elements * ELEMENT_BYTES[payload.dtype]
                found[payload.dtype] += plan.layout.slices * size
    return dict(found)


def _optimizer(train: TrainSpec) -> OptimizerFacts:
    if train.optimizer in PRECISION_AWARE:
        # They count their steps in Python.
        state_dtype = TORCH_NAMES[train.state_dtype]
        return OptimizerFacts(
            2, 0, state_dtype, train.master_weights, remainders=train.store_remainders
        )
    if train.optimizer in _CODES:
        return OptimizerFacts(2, 1, codes=_CODES[train.optimizer])
    return ADAM if train.optimizer == "adamw" else SGD


def _core_bytes(run: _Facts, rank: int) -> dict[str, int]:
    settings = core_switches(run.engine)
    strategy = parse_strategy(run.strategy, run.engine.outer_strategy)
    dtypes = run.dtypes
    codec = codec_of(run.engine)
    model = memory_of_buckets(
        _bucket_plans(run.shape, dtypes.compute, run.engine, run.data_parallel),
        strategy,
        _coordinate(run.engine, run.data_parallel, rank),
        PolicyNames(
            None if dtypes.main_params is None else TORCH_NAMES[dtypes.main_params],
            TORCH_NAMES[dtypes.main_grads],
            TORCH_NAMES[dtypes.grad_comm],
            settings.decoupled_grad,
        ),
        expert_coordinate=_expert_coordinate(run.engine, run.data_parallel, rank),
        optimizer=run.optimizer,
        gradients_attached=True,
        allocation=AllocationConfig(settings.allocator, settings.pool_slots),
        codec=codec,
    )
    return {name: count for name, count in model.bytes_by_category().items() if count}


def _coordinate(engine: EngineSpec, ranks: int, rank: int) -> Coordinate:
    """Of one of `ranks` that split the data; consecutive ones form an inner axis."""
    inner_size = ranks // engine.outer_size
    return Coordinate(
        inner_rank=rank % inner_size,
        inner_size=inner_size,
        outer_rank=rank // inner_size,
        outer_size=engine.outer_size,
        has_outer_axis=engine.outer_size > 1,
    )


def _expert_coordinate(engine: EngineSpec, ranks: int, rank: int) -> Coordinate:
    """The same among the ranks that share an expert: neighbours hold different ones."""
    size = engine.expert_parallel
    return _coordinate(engine, ranks // size, rank // size)


@lru_cache(maxsize=128)
def _bucket_plans(
    shape: ModelShape, compute: str, engine: EngineSpec, ranks: int
) -> tuple[BucketPlan, ...]:
    strategy = parse_strategy(engine.strategy or "no_shard", engine.outer_strategy)
    facts = _parameters(shape, compute, engine)
    return tuple(
        plan_buckets(
            facts,
            _coordinate(engine, ranks, 0).sub_shards(strategy),
            expert_slices=_expert_coordinate(engine, ranks, 0).sub_shards(strategy),
            codec=codec_of(engine),
        )
    )


def _parameters(shape: ModelShape, compute: str, engine: EngineSpec) -> tuple[ParameterFacts, ...]:
    return parameter_facts(
        shape,
        compute,
        tensor_parallel=engine.tensor_parallel,
        expert_parallel=engine.expert_parallel,
    )


def _torch_bytes(run: _Facts, rank: int) -> dict[str, int]:
    facts = _parameters(run.shape, run.dtypes.compute, run.engine)
    ranks = _shards(run)
    elements = sum(_chunk_elements(fact.shape, rank % ranks, ranks) for fact in facts)
    return _bytes_of_elements(run, elements, len(facts))


def _whole_parameter_bytes(run: _Facts, rank: int) -> dict[str, int]:
    """Replicas, with state of the parameters of one rank, as ZeroRedundancyOptimizer assigns them.

    Largest first, each to the rank with the fewest elements so far.
    """
    sizes = [prod(f.shape) for f in _parameters(run.shape, run.dtypes.compute, run.engine)]
    owned: list[list[int]] = [[] for _ in range(run.data_parallel)]
    for size in sorted(sizes, reverse=True):
        min(owned, key=sum).append(size)
    state = _bytes_of_elements(run, sum(owned[rank]), len(owned[rank])).get("optimizer_state", 0)
    found = _bytes_of_elements(run, sum(sizes), 0) | {"optimizer_state": state}
    return {name: count for name, count in found.items() if count}


def _flat_bytes(run: _Facts, _rank: int) -> dict[str, int]:
    """No less than this, for equal parts of flat parameters: without their padding and counters."""
    return _bytes_of_elements(run, run.shape.parameters // _shards(run), 0)


def _shards(run: _Facts) -> int:
    """Into how many parts a parameter is cut; an outer axis holds replicas of them."""
    inner = run.data_parallel // run.engine.outer_size
    return inner if INNER[run.strategy].shards_optimizer else 1


def _bytes_of_elements(run: _Facts, elements: int, tensors: int) -> dict[str, int]:
    """Weights, gradients and state of `elements`, which a rank holds of `tensors` parameters."""
    main = TORCH_NAMES[run.dtypes.main_params or run.dtypes.compute]
    weights = elements * ELEMENT_BYTES[main]
    optimizer = run.optimizer
    each = ELEMENT_BYTES[optimizer.state_dtype or main]
    state = optimizer.moments * elements * (each if optimizer.codes is None else 1)
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
    "whole_parameters": _whole_parameter_bytes,
    None: _unknown_bytes,
}
