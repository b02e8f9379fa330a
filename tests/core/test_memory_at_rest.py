"""What the core holds at rest is what `mfsdp_core.plan.memory_model` says, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy, fully_shard_optimizer
from mfsdp_core.plan.allocation import AllocationConfig
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.memory_model import ADAM, MemoryModel, PolicyNames, memory_at_rest
from mfsdp_core.plan.strategy import parse_strategy
from oracle.facts import facts_of, name_of
from oracle.hybrid import PAIRS, hybrid, hybrid_mesh
from oracle.models import TOYS
from oracle.ranks import GROUP_SIZES, WORLD, RankPool, mesh
from oracle.sharded import STRATEGIES, Sharded, shard

F64, F32, B16 = torch.float64, torch.float32, torch.bfloat16
Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None, torch.dtype | None]

#: Compute, main weights, main gradients, communication.
FP32: Dtypes = (F32, F32, None, None)
BF16: Dtypes = (B16, F32, F32, B16)
POLICIES: list[Dtypes] = [
    FP32,
    BF16,
    (B16, F32, None, None),
    (B16, None, F32, None),
    (B16, B16, F32, B16),
    (F32, F32, B16, F32),
    (F64, F32, F64, B16),
]
#: Toys whose buckets are padded, split, frozen or tied.
UNEVEN = ["conv_linear", "frozen", "tied_embedding"]


def predicted(
    name: str, strategy: tuple[str, str], coordinate: Coordinate, dtypes: Dtypes, **when: Any
) -> MemoryModel:
    compute, *policy = dtypes
    names = PolicyNames(*(None if dtype is None else name_of(dtype) for dtype in policy))
    return memory_at_rest(
        facts_of(name, compute), parse_strategy(*strategy), coordinate, names, **when
    )


def policy_of(dtypes: Dtypes) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(*dtypes[1:])


def differences(
    toy: Sharded,
    strategy: tuple[str, str],
    coordinate: Coordinate,
    dtypes: Dtypes,
    allocation: AllocationConfig | None = None,
) -> Iterator[str]:
    """Train one step; say where the ledger and the model disagree, at each of its stages."""

    def compare(when: str, **arguments: Any) -> Iterator[str]:
        expected = predicted(
            toy.name, strategy, coordinate, dtypes, allocation=allocation, **arguments
        )
        found = toy.model.ledger.bytes_by_category()
        if found != expected.bytes_by_category():
            yield (
                f"{toy.name} {strategy} {coordinate} {dtypes} {when}: ledger {found}, "
                f"model {expected.bytes_by_category()} = {expected.bytes_by_line()}"
            )

    yield from compare("as built")
    trainable = [p for p in toy.model.parameters() if p.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(trainable, lr=0.01, foreach=False))
    toy.run_cycle(1)
    yield from compare("with gradients", gradients_attached=True)
    optimizer.step()
    optimizer.zero_grad()
    yield from compare("after zero_grad", optimizer=ADAM)


def on_one_axis(strategy: str, group_size: int, cases: list[Dtypes]) -> list[str]:
    """In a rank."""
    coordinate = Coordinate(mesh(group_size).get_local_rank("dp"), group_size)
    return [
        line
        for name in TOYS
        for dtypes in cases
        for line in differences(
            shard(name, strategy, group_size, dtypes[0], mixed_precision_policy=policy_of(dtypes)),
            (strategy, "no_shard"),
            coordinate,
            dtypes,
        )
    ]


def with_pools(group_size: int, dtypes: Dtypes, allocation: AllocationConfig) -> list[str]:
    """In a rank."""
    coordinate = Coordinate(mesh(group_size).get_local_rank("dp"), group_size)
    return [
        line
        for name in ("unequal_units", "conv_linear")
        for strategy in ("optim_grads", "optim_grads_params")
        for line in differences(
            shard(
                name,
                strategy,
                group_size,
                dtypes[0],
                mixed_precision_policy=policy_of(dtypes),
                **arguments_of(allocation),
            ),
            (strategy, "no_shard"),
            coordinate,
            dtypes,
            allocation=allocation,
        )
    ]


def arguments_of(allocation: AllocationConfig) -> dict[str, Any]:
    return {
        "allocator": allocation.allocator,
        "pool_slots": allocation.slots,
        "fsdp_db_use_persist_buf_on_alloc_fail": allocation.persistent_fallback,
    }


def handed_over_decoupled(group_size: int, strategy: str) -> list[str]:
    """In a rank: BF16 main gradients for FP32 main weights, which would be cast otherwise."""
    dtypes: Dtypes = (B16, F32, B16, B16)
    coordinate = Coordinate(mesh(group_size).get_local_rank("dp"), group_size)
    found = []
    for decoupled in (False, True):
        toy = shard(
            "conv_linear",
            strategy,
            group_size,
            B16,
            mixed_precision_policy=policy_of(dtypes),
            use_decoupled_grad=decoupled,
        )
        toy.run_cycle(1)
        names = PolicyNames("float32", "bfloat16", "bfloat16", decoupled)
        expected = memory_at_rest(
            facts_of("conv_linear", B16),
            parse_strategy(strategy, "no_shard"),
            coordinate,
            names,
            gradients_attached=True,
        )
        if toy.model.ledger.bytes_by_category() != expected.bytes_by_category():
            found.append(f"{decoupled}: {toy.model.ledger.bytes_by_category()}, {expected}")
        if ("cast gradient" in expected.bytes_by_line()) == decoupled:
            found.append(f"{decoupled}: {expected.bytes_by_line()}")
    return found


def on_two_axes(
    inner: str,
    outer: str,
    outer_size: int,
    cases: list[Dtypes],
    names: list[str],
    allocation: AllocationConfig | None = None,
) -> list[str]:
    """In a rank."""
    axes = hybrid_mesh(outer_size)
    coordinate = Coordinate(
        axes.get_local_rank("inner"),
        axes.size(1),
        axes.get_local_rank("outer"),
        outer_size,
        has_outer_axis=True,
    )
    return [
        line
        for name in names
        for dtypes in cases
        for line in differences(
            hybrid(
                inner,
                outer,
                outer_size,
                dtypes[0],
                name,
                mixed_precision_policy=policy_of(dtypes),
                unused_parameters="zero",  # the model counts state of every parameter
                **({} if allocation is None else arguments_of(allocation)),
            ),
            (inner, outer),
            coordinate,
            dtypes,
            allocation,
        )
    ]


@pytest.mark.sample
@pytest.mark.processes
@pytest.mark.parametrize(("group_size", "dtypes"), [(1, BF16), (2, FP32), (4, BF16)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_ledger_equals_the_model_to_the_byte(
    ranks: RankPool, strategy: str, group_size: int, dtypes: Dtypes
) -> None:
    assert ranks.run(on_one_axis, strategy, group_size, [dtypes]) == [[]] * WORLD


@pytest.mark.processes
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_the_ledger_equals_the_model_on_two_axes(ranks: RankPool, inner: str, outer: str) -> None:
    assert ranks.run(on_two_axes, inner, outer, 2, [BF16], UNEVEN) == [[]] * WORLD


@pytest.mark.processes
@pytest.mark.parametrize(
    "allocation",
    [
        AllocationConfig("max_pool", 3),
        AllocationConfig("fixed_pool", 2),
        AllocationConfig("fixed_pool", 2, persistent_fallback=True),
    ],
    ids=lambda a: f"{a.allocator}-{a.persistent_fallback}",
)
def test_pools_are_counted_to_the_byte_from_the_start(
    ranks: RankPool, allocation: AllocationConfig
) -> None:
    assert ranks.run(with_pools, 2, BF16, allocation) == [[]] * WORLD


@pytest.mark.processes
@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_the_pool_of_the_outer_reduction_is_counted_too(ranks: RankPool, outer: str) -> None:
    pooled = AllocationConfig("max_pool", 2)
    inner = "optim_grads_params"
    found = ranks.run(on_two_axes, inner, outer, 2, [BF16], ["conv_linear"], pooled)
    assert found == [[]] * WORLD


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_decoupled_gradients_are_never_counted_as_cast(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(handed_over_decoupled, 2, strategy) == [[]] * WORLD


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_ledger_equals_the_model_in_every_dtype(
    ranks: RankPool, strategy: str, group_size: int
) -> None:
    found = ranks.run(on_one_axis, strategy, group_size, POLICIES, seconds=240.0)
    assert found == [[]] * WORLD


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("outer_size", [1, 2, 4])
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_the_ledger_equals_the_model_on_every_mesh_in_every_dtype(
    ranks: RankPool, inner: str, outer: str, outer_size: int
) -> None:
    found = ranks.run(on_two_axes, inner, outer, outer_size, POLICIES, list(TOYS), seconds=400.0)
    assert found == [[]] * WORLD
