"""Bytes that a rank holds at rest, as a formula: nothing is allocated, nothing is measured.

At rest means after `zero_grad`: no pass runs, no gradient is attached. Per bucket of S elements
(padding included) on N inner and M outer ranks:

line                     category         elements            dtype        where
compute weights          compute_weights  S                   compute      parameter REPLICATE
preserved root weights   compute_weights  S                   compute      parameter FLAT, root only
compute shard            compute_weights  S/N                 compute      parameter FLAT, and the
                                                                           outer axis shards the
                                                                           optimizer
main weights             main_weights     S/N, or S/(N*M),    main_params  main and compute dtypes
                                          or S where the                   differ, or a shard that
                                          optimizer is whole               serves as both
gradient accumulator     gradients        S, or S/N           main_grads   trainable
cast gradient            gradients        as the gradient     main_params  until `zero_grad` only,
                                          that is handed over              main_grads differs
optimizer state          optimizer_state  as main weights,    main_params  trainable
                                          without padding                  (or its own)
master weights           optimizer_state  as optimizer state  float32      an optimizer that copies
step counters            optimizer_state  one per parameter   float32      trainable
weight pool              compute_weights  of all its slots    compute      an allocator that is a
                                                                           pool: `plan/pools.py`
gradient pool,           communication_   of all their slots  grad_comm    the same
outer pool               buffers
weights without slot     compute_weights  S                   compute      units that no slot
                                                                           serves, if persistent
buckets without slot     communication_   S, or S/N           grad_comm    the same and the root,
                         buffers                                           from the first step on

S/N serves as the HFSDP helper as well: an outer axis that shards the optimizer needs the inner
slice beside its own sub-shard. Padding is a line of its own. [Note: one copy] of
`runtime/weight_buffers.py` decides what is booked as main weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mfsdp_core.errors import ConfigurationError
from mfsdp_core.plan.allocation import AllocationConfig
from mfsdp_core.plan.buffers import PooledRole, plan_pools, transient_buffers
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.dtype_policy import GroupDtypes, resolve_bucket_dtypes
from mfsdp_core.plan.grouping import ROOT, BucketPlan, ParameterFacts, plan_buckets
from mfsdp_core.plan.layout import Layout
from mfsdp_core.plan.pools import BucketRequest
from mfsdp_core.plan.strategy import Strategy

Category = Literal[
    "main_weights",
    "compute_weights",
    "gradients",
    "communication_buffers",
    "optimizer_state",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

LineName = Literal[
    "main weights",
    "compute weights",
    "preserved root weights",
    "compute shard",
    "gradient accumulator",
    "cast gradient",
    "optimizer state",
    "master weights",
    "step counters",
    "weight pool",
    "gradient pool",
    "outer pool",
    "weights without slot",
    "buckets without slot",
]
#: Name under which the padding of all lines is added up.
PADDING = "padding"
#: Stands for the bucket where all slots of a pool are booked as one.
POOL = "(pool)"

#: Bytes of one element, by torch's name of the dtype.
ELEMENT_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
}


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One reason for which a bucket takes memory on this rank.

    used_elements: of parameters; padding_elements: between and behind them, in the same buffer.
    """

    bucket: str
    name: LineName
    category: Category
    dtype: str
    used_elements: int
    padding_elements: int = 0

    @property
    def used_bytes(self) -> int:
        """Without padding."""
        return self.used_elements * ELEMENT_BYTES[self.dtype]

    @property
    def padding_bytes(self) -> int:
        """Of the padding alone."""
        return self.padding_elements * ELEMENT_BYTES[self.dtype]

    @property
    def total_bytes(self) -> int:
        """What is allocated."""
        return self.used_bytes + self.padding_bytes


@dataclass(frozen=True)
class MemoryModel:
    """The account of one rank: `lines` of all buckets, in the order of the buckets."""

    lines: tuple[MemoryLine, ...]

    @property
    def total_bytes(self) -> int:
        """Sum of all lines."""
        return sum(line.total_bytes for line in self.lines)

    def bytes_by_category(self) -> dict[str, int]:
        """The categories of the ledger, all of them."""
        totals: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        for line in self.lines:
            totals[line.category] += line.total_bytes
        return totals

    def bytes_by_line(self) -> dict[str, int]:
        """Bytes by name of the line, without their padding, which is the last entry."""
        totals: dict[str, int] = {}
        for line in self.lines:
            totals[line.name] = totals.get(line.name, 0) + line.used_bytes
        padding = sum(line.padding_bytes for line in self.lines)
        return totals | {PADDING: padding}


_POOL_LINES: Mapping[PooledRole, tuple[LineName, LineName, Category]] = {
    "compute_weights": ("weight pool", "weights without slot", "compute_weights"),
    "grad_bucket": ("gradient pool", "buckets without slot", "communication_buffers"),
    "outer_bucket": ("outer pool", "buckets without slot", "communication_buffers"),
}


@dataclass(frozen=True)
class PolicyNames:
    """`MixedPrecisionPolicy` in torch's names of dtypes; None is left to the rules of resolution.

    decoupled_grad: `use_decoupled_grad`, gradients are handed over as they are and never cast.

    Raises:
        ConfigurationError: a dtype of unknown size.
    """

    main_params: str | None = "float32"
    main_grads: str | None = None
    grad_comm: str | None = None
    decoupled_grad: bool = False

    def __post_init__(self) -> None:
        """Check the names."""
        for name in (self.main_params, self.main_grads, self.grad_comm):
            if name is not None:
                _check_known(name)


@dataclass(frozen=True)
class OptimizerFacts:
    """What an optimizer keeps of each trainable parameter.

    moments: tensors of the parameter's local shape, in `state_dtype`, or in the dtype of the main
    weights where that is None. counters: FP32 scalars. master_weights: a copy of its own of the
    weights, in FP32 or wider.
    """

    moments: int
    counters: int
    state_dtype: str | None = None
    master_weights: bool = False


#: torch.optim.Adam and AdamW: two moments and a step counter.
ADAM = OptimizerFacts(moments=2, counters=1)
#: torch.optim.SGD without momentum.
SGD = OptimizerFacts(moments=0, counters=0)


def memory_at_rest(  # noqa: PLR0913 - each of them decides about bytes
    parameters: Sequence[ParameterFacts],
    strategy: Strategy,
    coordinate: Coordinate,
    policy: PolicyNames,
    *,
    expert_coordinate: Coordinate | None = None,
    bucketing: bool = True,
    optimizer: OptimizerFacts | None = None,
    gradients_attached: bool = False,
    allocation: AllocationConfig | None = None,
) -> MemoryModel:
    """What the rank at `coordinate` holds between `zero_grad` and the next forward pass.

    expert_coordinate: the rank's coordinate on the mesh of experts, needed where there are experts.
    bucketing: see `plan_buckets`. optimizer: also counts its state, which exists after the first
    step. gradients_attached: the point of the optimizer's step instead, when cast gradients exist
    as well. allocation: None is the default allocator; what a pool keeps for gradients that no slot
    serves exists from the first step on, which `optimizer` and `gradients_attached` imply.

    Raises:
        ConfigurationError: a dtype of unknown size, or experts without a coordinate.
    """
    plans = plan_buckets(
        parameters,
        coordinate.sub_shards(strategy),
        expert_slices=(expert_coordinate or coordinate).sub_shards(strategy),
        bucketing=bucketing,
    )
    return memory_of_buckets(
        plans,
        strategy,
        coordinate,
        policy,
        expert_coordinate=expert_coordinate,
        optimizer=optimizer,
        gradients_attached=gradients_attached,
        allocation=allocation,
    )


def memory_of_buckets(
    plans: Sequence[BucketPlan],
    strategy: Strategy,
    coordinate: Coordinate,
    policy: PolicyNames,
    *,
    expert_coordinate: Coordinate | None = None,
    optimizer: OptimizerFacts | None = None,
    gradients_attached: bool = False,
    allocation: AllocationConfig | None = None,
) -> MemoryModel:
    """`memory_at_rest` of buckets that are planned already, over `coordinate.sub_shards(strategy)`.

    Raises:
        ConfigurationError: a dtype of unknown size, or experts without a coordinate.
    """
    lines: list[MemoryLine] = []
    requests: dict[PooledRole, list[BucketRequest]] = {}
    for plan in plans:
        _check_known(plan.dtype)
        where = expert_coordinate if plan.is_expert else coordinate
        if where is None:
            raise ConfigurationError(
                f"{plan.name} holds experts: pass expert_coordinate, their mesh coordinate"
            )
        dtypes = resolve_bucket_dtypes(
            plan.dtype,
            policy.main_params,
            policy.main_grads,
            policy.grad_comm,
            trainable=plan.requires_grad,
        )
        bucket = _Bucket(plan, strategy, where, dtypes)
        lines += bucket.weights()
        if plan.requires_grad:
            cast = gradients_attached and not policy.decoupled_grad
            lines += bucket.gradients(attached=cast)
            lines += bucket.optimizer_state(optimizer) if optimizer is not None else ()
        for role, request in bucket.requests():
            requests.setdefault(role, []).append(request)
    used = gradients_attached or optimizer is not None
    lines += _pool_lines(allocation or AllocationConfig(), requests, used=used)
    return MemoryModel(tuple(lines))


def _pool_lines(
    config: AllocationConfig,
    requests: Mapping[PooledRole, Sequence[BucketRequest]],
    *,
    used: bool,
) -> Iterator[MemoryLine]:
    """What the allocator keeps for buffers that come and go; `used`: a step has been made."""
    if config.pool is None:
        return
    pools = plan_pools(config, requests)
    for role, plan in pools.items():
        pooled, _, category = _POOL_LINES[role]
        for area in plan.areas:
            elements = plan.slots * area.elements
            yield MemoryLine(POOL, pooled, category, area.dtype, elements)
    for role, wanted in requests.items() if config.persistent_fallback else ():
        _, alone, category = _POOL_LINES[role]
        if role != "compute_weights" and not used:
            continue
        served = pools[role].seats if role in pools else {}
        for request in wanted:
            if request.bucket not in served:
                padding = request.padding_elements
                elements = request.elements - padding
                yield MemoryLine(request.bucket, alone, category, request.dtype, elements, padding)


@dataclass(frozen=True)
class _Bucket:
    """Extents of one bucket's buffers on one rank: [start, end) of its flat layout."""

    plan: BucketPlan
    strategy: Strategy
    coordinate: Coordinate
    dtypes: GroupDtypes[str]

    @property
    def _whole(self) -> tuple[int, int]:
        return 0, self.plan.layout.total_elements

    @property
    def _inner_slice(self) -> tuple[int, int]:
        elements = self.plan.layout.total_elements // self.coordinate.inner_size
        return self.coordinate.inner_rank * elements, (self.coordinate.inner_rank + 1) * elements

    @property
    def _owned(self) -> tuple[int, int]:
        """What this rank's optimizer updates."""
        if not self.strategy.inner.shards_optimizer:
            return self._whole
        return self.plan.layout.slice_range(self.coordinate.sub_shard(self.strategy))

    def weights(self) -> Iterator[MemoryLine]:
        """Compute and main weights."""
        compute, main = self.dtypes.compute, self.dtypes.main_params
        if self.strategy.inner.gathers_every_use:
            if self.plan.unit == ROOT:
                yield self._line("preserved root weights", "compute_weights", compute, self._whole)
            if self.strategy.outer.shards_optimizer:
                yield self._line("compute shard", "compute_weights", compute, self._inner_slice)
            elif self.dtypes.shares_weights:
                yield self._line("main weights", "main_weights", compute, self._inner_slice)
        else:
            yield self._line("compute weights", "compute_weights", compute, self._whole)
        if not self.dtypes.shares_weights:
            yield self._line("main weights", "main_weights", main, self._owned)

    def gradients(self, *, attached: bool) -> Iterator[MemoryLine]:
        """The accumulator, and the cast copy that lives from the reduction to `zero_grad`."""
        sharded = self.strategy.inner.reduces_every_microbatch
        extent = self._inner_slice if sharded else self._whole
        yield self._line("gradient accumulator", "gradients", self.dtypes.main_grads, extent)
        if attached and self.dtypes.casts_gradient:
            yield self._line("cast gradient", "gradients", self.dtypes.main_params, self._owned)

    def optimizer_state(self, facts: OptimizerFacts) -> Iterator[MemoryLine]:
        """Moments of this rank's rows; a counter per parameter, also where it has no rows."""
        used = _used_elements(self.plan.layout, *self._owned)
        name, main = self.plan.name, self.dtypes.main_params
        dtype = facts.state_dtype or main
        yield MemoryLine(name, "optimizer state", "optimizer_state", dtype, facts.moments * used)
        if facts.master_weights:
            wide = main if main == "float64" else "float32"
            yield MemoryLine(name, "master weights", "optimizer_state", wide, used)
        counters = facts.counters * len(self.plan.members)
        yield MemoryLine(name, "step counters", "optimizer_state", "float32", counters)

    def requests(self) -> Iterator[tuple[PooledRole, BucketRequest]]:
        """What the bucket's unit asks the allocators for while it is at work."""
        plan = self.plan
        for wanted in transient_buffers(plan, self.strategy, self.coordinate, self.dtypes):
            yield (
                wanted.role,
                BucketRequest(
                    plan.unit,
                    plan.name,
                    wanted.dtype,
                    wanted.elements,
                    ELEMENT_BYTES[wanted.dtype],
                    wanted.padding_elements,
                ),
            )

    def _line(
        self, name: LineName, category: Category, dtype: str, extent: tuple[int, int]
    ) -> MemoryLine:
        start, end = extent
        used = _used_elements(self.plan.layout, start, end)
        return MemoryLine(self.plan.name, name, category, dtype, used, end - start - used)


def _used_elements(layout: Layout, start: int, end: int) -> int:
    """Elements of parameters within [start, end) of the flat buffer."""
    return sum(max(0, min(slot.end, end) - max(slot.offset, start)) for slot in layout.slots)


def _check_known(dtype: str) -> None:
    if dtype not in ELEMENT_BYTES:
        raise ConfigurationError(
            f"no element size is known for the dtype {dtype!r}; expected one of "
            f"{', '.join(ELEMENT_BYTES)}, torch's names without prefix."
        )
