"""Bytes that a rank holds at rest, as a formula: nothing is allocated, nothing is measured.

At rest means after `zero_grad`: no pass runs, no gradient is there. The lines of a bucket are the
rows of its table in `plan/buffers.py` that last as long as the model, and besides them:

line                     category               elements            dtype
gradient accumulator     gradients              as its row          main_grads, until `zero_grad`
cast gradient            gradients              as its row          main_params, until `zero_grad`
optimizer state          optimizer_state        as main weights,    main_params (or its own)
                                                without padding
master weights           optimizer_state        as optimizer state  float32 (or wider)
weight remainders        optimizer_state        as optimizer state  int16
step counters            optimizer_state        one per parameter   float32
weight pool              compute_weights        of all its slots    compute
gradient, outer pool     communication_buffers  of all their slots  grad_comm
weights without slot     compute_weights        as their row        compute
buckets without slot     communication_buffers  as their row        grad_comm

The last two are of units that no slot of a pool serves, if these keep their buffers; buckets are
there from the first step on, the root's too. Padding is a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mfsdp_core.errors import ConfigurationError
from mfsdp_core.plan.allocation import AllocationConfig
from mfsdp_core.plan.buffers import (
    CATEGORIES,
    CATEGORY_OF_ROLE,
    BucketBuffers,
    Category,
    PooledRole,
    Role,
    plan_buffers,
    plan_pools,
    pool_requests,
    used_elements,
    used_of_slot,
)
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.dtype_policy import ELEMENT_BYTES, FLOATING, resolve_dtypes
from mfsdp_core.plan.grouping import BucketPlan, ParameterFacts, plan_buckets
from mfsdp_core.plan.payload import PayloadPlan
from mfsdp_core.plan.pools import BucketRequest
from mfsdp_core.plan.strategy import Strategy

LineName = Literal[
    "main weights",
    "compute weights",
    "preserved root weights",
    "compute shard",
    "payload shard",
    "gradient accumulator",
    "cast gradient",
    "optimizer state",
    "master weights",
    "moment scales",
    "weight remainders",
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


_LINE_OF_ROLE: Mapping[Role, LineName] = {
    "main_weights": "main weights",
    "compute_weights": "compute weights",
    "compute_shard": "compute shard",
    "payload_shard": "payload shard",
    "accumulator": "gradient accumulator",
    "grad_cast": "cast gradient",
}
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
class MomentCodes:
    """Moments of one byte per element, and an FP32 scale per `block` elements.

    table: FP32 values that codes stand for, which every moment has. least: elements of a parameter
    on a rank below which its moments stay plain, as they do where they are no whole blocks.
    """

    block: int = 256
    table: int = 0
    least: int = 4096

    def takes(self, elements: int) -> bool:
        """Whether a part of that many elements is coded."""
        return elements >= self.least and elements % self.block == 0


@dataclass(frozen=True)
class OptimizerFacts:
    """What an optimizer keeps of each trainable parameter.

    moments: tensors of the parameter's local shape, in `state_dtype`, or in the dtype of the main
    weights where that is None. counters: FP32 scalars. master_weights: a copy of its own of the
    weights, in FP32 or wider. remainders: the 16 bits that BF16 weights lack to FP32 ones. codes:
    how torchao's optimizers keep the moments of parameters that can be coded (`MomentCodes`).
    """

    moments: int
    counters: int
    state_dtype: str | None = None
    master_weights: bool = False
    remainders: bool = False
    codes: MomentCodes | None = None


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
    codec: PayloadPlan | None = None,
) -> MemoryModel:
    """What the rank at `coordinate` holds between `zero_grad` and the next forward pass.

    expert_coordinate: the rank's coordinate on the mesh of experts, needed where there are experts.
    bucketing: see `plan_buckets`. optimizer: also counts its state, which exists after the first
    step. gradients_attached: the point of the optimizer's step instead, when gradients exist as
    well. allocation: None is the default allocator; what a pool keeps for gradients that no slot
    serves exists from the first step on, which `optimizer` and `gradients_attached` imply. codec:
    what encodes weights on their way; its payloads have lines of their own.

    Raises:
        ConfigurationError: a dtype of unknown size, or experts without a coordinate.
    """
    plans = plan_buckets(
        parameters,
        coordinate.sub_shards(strategy),
        expert_slices=(expert_coordinate or coordinate).sub_shards(strategy),
        bucketing=bucketing,
        codec=codec,
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
        codec=codec,
    )


def memory_of_buckets(  # noqa: PLR0913 - as above
    plans: Sequence[BucketPlan],
    strategy: Strategy,
    coordinate: Coordinate,
    policy: PolicyNames,
    *,
    expert_coordinate: Coordinate | None = None,
    optimizer: OptimizerFacts | None = None,
    gradients_attached: bool = False,
    allocation: AllocationConfig | None = None,
    codec: PayloadPlan | None = None,
) -> MemoryModel:
    """`memory_at_rest` of buckets that are planned already, over `coordinate.sub_shards(strategy)`.

    Raises:
        ConfigurationError: a dtype of unknown size, or experts without a coordinate.
    """
    allocation = allocation or AllocationConfig()
    lines: list[MemoryLine] = []
    tables: list[BucketBuffers] = []
    for plan in plans:
        _check_known(plan.dtype)
        where = expert_coordinate if plan.is_expert else coordinate
        if where is None:
            raise ConfigurationError(
                f"{plan.name} holds experts: pass expert_coordinate, their mesh coordinate"
            )
        dtypes = resolve_dtypes(
            plan.dtype,
            policy.main_params,
            policy.main_grads,
            policy.grad_comm,
            trainable=plan.requires_grad,
        )
        payloads = codec.payloads(plan.layout, plan.dtype) if codec and plan.is_encoded else ()
        table = plan_buffers(
            plan,
            strategy,
            where,
            dtypes,
            payloads,
            decoupled=policy.decoupled_grad,
            pooled=allocation.pool is not None,
        )
        tables.append(table)
        lines += _lines_at_rest(table, strategy, attached=gradients_attached)
        if plan.requires_grad and optimizer is not None:
            lines += _optimizer_lines(table, dtypes.main_params, optimizer)
    requests = pool_requests(tables, ELEMENT_BYTES.__getitem__)
    used = gradients_attached or optimizer is not None
    lines += _pool_lines(allocation, requests, used=used)
    return MemoryModel(tuple(lines))


def _pool_lines(
    config: AllocationConfig,
    requests: Mapping[PooledRole, Sequence[BucketRequest]],
    *,
    used: bool,
) -> Iterator[MemoryLine]:
    """What the allocator keeps for transient buffers; `used`: a step has been made."""
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
        served = pools[role].area_of if role in pools else {}
        for request in wanted:
            if request.bucket not in served:
                padding = request.padding_elements
                elements = request.elements - padding
                yield MemoryLine(request.bucket, alone, category, request.dtype, elements, padding)


def _lines_at_rest(
    table: BucketBuffers, strategy: Strategy, *, attached: bool
) -> Iterator[MemoryLine]:
    """What the bucket's own buffers take. attached: gradients have been handed over."""
    for row in table.rows:
        if row.lifetime == "model" or (row.lifetime in ("cycle", "step") and attached):
            name = _LINE_OF_ROLE[row.role]
            if row.role == "compute_weights" and strategy.inner.gathers_every_use:
                name = "preserved root weights"
            category, used = CATEGORY_OF_ROLE[row.role], table.used_elements(row)
            padding = row.elements - used
            yield MemoryLine(table.plan.name, name, category, row.dtype, used, padding)


def _optimizer_lines(
    table: BucketBuffers, main: str, facts: OptimizerFacts
) -> Iterator[MemoryLine]:
    """Moments of this rank's rows; a counter per parameter, also where it has no rows."""
    name, used = table.plan.name, used_elements(table.plan.layout, *table.owned)
    dtype = facts.state_dtype or main
    if facts.codes is not None:
        sizes = [used_of_slot(slot, *table.owned) for slot in table.plan.layout.slots]
        coded = [size for size in sizes if facts.codes.takes(size)]
        used_by_codes = facts.moments * sum(coded)
        scales = used_by_codes // facts.codes.block + facts.moments * len(coded) * facts.codes.table
        yield MemoryLine(name, "optimizer state", "optimizer_state", "uint8", used_by_codes)
        yield MemoryLine(name, "moment scales", "optimizer_state", "float32", scales)
        plain = facts.moments * (used - sum(coded))
        yield MemoryLine(name, "optimizer state", "optimizer_state", dtype, plain)
    else:
        yield MemoryLine(name, "optimizer state", "optimizer_state", dtype, facts.moments * used)
    if facts.master_weights:
        wide = main if main == "float64" else "float32"
        yield MemoryLine(name, "master weights", "optimizer_state", wide, used)
    if facts.remainders:
        yield MemoryLine(name, "weight remainders", "optimizer_state", "int16", used)
    counters = facts.counters * len(table.plan.members)
    yield MemoryLine(name, "step counters", "optimizer_state", "float32", counters)


def _check_known(dtype: str) -> None:
    if dtype not in FLOATING:
        raise ConfigurationError(
            f"no element size is known for the dtype {dtype!r}; expected one of "
            f"{', '.join(FLOATING)}, torch's names without prefix."
        )
