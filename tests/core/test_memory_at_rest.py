"""What the core holds at rest is what `mfsdp_core.plan.memory_model` says, to the byte."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy, fully_shard_optimizer
from mfsdp_core.plan.allocation import AllocationConfig
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.memory_model import ADAM, MemoryModel, PolicyNames, memory_at_rest
from mfsdp_core.plan.strategy import parse_strategy
from oracle.facts import facts_of, name_of
from oracle.hybrid import PAIRS, hybrid
from oracle.models import TOYS
from oracle.ranks import GROUP_SIZES, mesh, two_axes
from oracle.sharded import STRATEGIES, Sharded, shard

pytestmark = pytest.mark.on_ranks

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


def arguments_of(allocation: AllocationConfig | None) -> dict[str, Any]:
    if allocation is None:
        return {}
    return {
        "allocator": allocation.allocator,
        "pool_slots": allocation.slots,
        "fsdp_db_use_persist_buf_on_alloc_fail": allocation.persistent_fallback,
    }


def compare(
    toy: Sharded,
    strategy: tuple[str, str],
    coordinate: Coordinate,
    dtypes: Dtypes,
    allocation: AllocationConfig | None = None,
) -> None:
    """The ledger with the model at each stage of a step."""

    def same_bytes(when: str, **arguments: Any) -> None:
        expected = predicted(
            toy.name, strategy, coordinate, dtypes, allocation=allocation, **arguments
        )
        found = toy.model.ledger.bytes_by_category()
        assert found == expected.bytes_by_category(), (
            f"{toy.name} {strategy} {coordinate} {dtypes} {when}: ledger {found}, "
            f"model {expected.bytes_by_category()} = {expected.bytes_by_line()}"
        )

    same_bytes("as built")
    trainable = [p for p in toy.model.parameters() if p.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(trainable, lr=0.01, foreach=False))
    toy.run_cycle(1)
    same_bytes("with gradients", gradients_attached=True)
    optimizer.step()
    optimizer.zero_grad()
    same_bytes("after zero_grad", optimizer=ADAM)


def on_one_axis(
    strategy: str,
    group_size: int,
    cases: list[Dtypes],
    names: Iterable[str] = tuple(TOYS),
    allocation: AllocationConfig | None = None,
) -> None:
    coordinate = Coordinate(mesh(group_size).get_local_rank("dp"), group_size)
    for name, dtypes in product(names, cases):
        options = {"mixed_precision_policy": policy_of(dtypes), **arguments_of(allocation)}
        toy = shard(name, strategy, group_size, dtypes[0], **options)
        compare(toy, (strategy, "no_shard"), coordinate, dtypes, allocation)


def on_two_axes(
    inner: str,
    outer: str,
    outer_size: int,
    cases: list[Dtypes],
    names: Iterable[str],
    allocation: AllocationConfig | None = None,
) -> None:
    axes, _ = two_axes(outer_size)
    inner_place = (axes.get_local_rank("inner"), axes.size(1))
    outer_place = (axes.get_local_rank("outer"), outer_size)
    coordinate = Coordinate(*inner_place, *outer_place, has_outer_axis=True)
    for name, dtypes in product(names, cases):
        options = {"mixed_precision_policy": policy_of(dtypes), **arguments_of(allocation)}
        options["unused_parameters"] = "zero"  # the model counts state of every parameter
        toy = hybrid(inner, outer, outer_size, dtypes[0], name, **options)
        compare(toy, (inner, outer), coordinate, dtypes, allocation)


@pytest.mark.sample
@pytest.mark.parametrize(("group_size", "dtypes"), [(1, BF16), (2, FP32), (4, BF16)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_ledger_equals_the_model_to_the_byte(
    strategy: str, group_size: int, dtypes: Dtypes
) -> None:
    on_one_axis(strategy, group_size, [dtypes])


@pytest.mark.parametrize(
    ("outer_size", "policies", "names"),
    [(2, [BF16], UNEVEN)]
    + [pytest.param(n, POLICIES, tuple(TOYS), marks=pytest.mark.nightly) for n in (1, 2, 4)],
)
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_the_ledger_equals_the_model_on_two_axes(
    inner: str, outer: str, outer_size: int, policies: list[Dtypes], names: tuple[str, ...]
) -> None:
    on_two_axes(inner, outer, outer_size, policies, names)


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
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
    allocation: AllocationConfig, strategy: str
) -> None:
    on_one_axis(strategy, 2, [BF16], ("unequal_units", "conv_linear"), allocation)


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_the_pool_of_the_outer_reduction_is_counted_too(outer: str) -> None:
    pooled = AllocationConfig("max_pool", 2)
    on_two_axes("optim_grads_params", outer, 2, [BF16], ["conv_linear"], pooled)


@pytest.mark.parametrize("is_decoupled", [False, True])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_decoupled_gradients_are_never_counted_as_cast(strategy: str, is_decoupled: bool) -> None:
    """BF16 main gradients for FP32 main weights, which would be cast otherwise."""
    coordinate = Coordinate(mesh(2).get_local_rank("dp"), 2)
    policy = policy_of((B16, F32, B16, B16))
    options = {"mixed_precision_policy": policy, "use_decoupled_grad": is_decoupled}
    toy = shard("conv_linear", strategy, 2, B16, **options)
    toy.run_cycle(1)
    expected = memory_at_rest(
        facts_of("conv_linear", B16),
        parse_strategy(strategy, "no_shard"),
        coordinate,
        PolicyNames("float32", "bfloat16", "bfloat16", is_decoupled),
        gradients_attached=True,
    )
    found = toy.model.ledger.bytes_by_category()
    assert found == expected.bytes_by_category(), (found, expected)
    assert ("cast gradient" in expected.bytes_by_line()) != is_decoupled, expected


@pytest.mark.nightly
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_ledger_equals_the_model_in_every_dtype(strategy: str, group_size: int) -> None:
    on_one_axis(strategy, group_size, POLICIES)
