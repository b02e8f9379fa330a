"""What the ledger books at rest is the sum of the core's table of buffers, to the byte."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy, fully_shard_optimizer
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.options import AllocationConfig
from mfsdp_core.plan.strategy import parse_strategy
from oracle.facts import facts_of, name_of
from oracle.hybrid import PAIRS, hybrid
from oracle.models import TOYS
from oracle.ranks import GROUP_SIZES, WORLD, mesh, two_axes
from oracle.rest import bytes_at_rest
from oracle.sharded import STRATEGIES, Sharded, shard

pytestmark = pytest.mark.on_ranks

F64, F32, B16 = torch.float64, torch.float32, torch.bfloat16
Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None, torch.dtype | None]

#: Compute, main weights, main gradients, communication.
FP32: Dtypes = (F32, F32, None, None)
BF16: Dtypes = (B16, F32, F32, B16)
POLICIES: tuple[Dtypes, ...] = (
    FP32,
    BF16,
    (B16, F32, None, None),
    (B16, None, F32, None),
    (B16, B16, F32, B16),
    (F32, F32, B16, F32),
    (F64, F32, F64, B16),
)
#: Toys whose buckets are padded, split, frozen or tied.
UNEVEN = ("conv_linear", "frozen", "tied_embedding")


def compare(
    name: str,
    strategy: tuple[str, str],
    meshes: tuple[int, int],
    dtypes: Dtypes,
    allocation: AllocationConfig | None = None,
) -> None:
    """The ledger with the table at each stage of a step. meshes: inner and outer ranks, 0: none."""
    compute, *policy = dtypes
    options: dict[str, Any] = {"mixed_precision_policy": MixedPrecisionPolicy(*policy)}
    if allocation is not None:
        options["allocator"], options["pool_slots"] = allocation.allocator, allocation.slots
        options["fsdp_db_use_persist_buf_on_alloc_fail"] = allocation.persistent_fallback
    inner, outer = meshes
    if outer:
        options["unused_parameters"] = "zero"  # state of every parameter is counted
        toy: Sharded = hybrid(*strategy, outer, compute, name, **options)
        axes, _ = two_axes(outer)
        ranks = (axes.get_local_rank("inner"), inner, axes.get_local_rank("outer"), outer)
        coordinate = Coordinate(*ranks, has_outer_axis=True)
    else:
        toy = shard(name, strategy[0], inner, compute, **options)
        coordinate = Coordinate(mesh(inner).get_local_rank("dp"), inner)
    main, grads, comm = (None if dtype is None else name_of(dtype) for dtype in policy)

    def same_bytes(when: str, **arguments: Any) -> None:
        expected = bytes_at_rest(
            facts_of(name, compute),
            parse_strategy(*strategy),
            coordinate,
            (main, grads, comm),
            allocation=allocation,
            **arguments,
        )
        found = toy.model.ledger.bytes_by_category()
        assert found == expected, (
            f"{name} {strategy} {coordinate} {dtypes} {when}: ledger {found}, table {expected}"
        )

    same_bytes("as built")
    trainable = [p for p in toy.model.parameters() if p.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(trainable, lr=0.01, foreach=False))
    toy.run_cycle(1)
    same_bytes("with gradients", gradients=True)
    optimizer.step()
    optimizer.zero_grad()
    same_bytes("after zero_grad", adam=True)


@pytest.mark.parametrize(
    ("strategy", "meshes", "policies", "names"),
    [
        (("no_shard", "no_shard"), (1, 0), [BF16], UNEVEN),
        (("no_shard", "no_shard"), (2, 0), [FP32], TOYS),
        (("optim", "no_shard"), (2, 0), [FP32], UNEVEN),
        (("optim_grads", "no_shard"), (4, 0), [BF16], UNEVEN),
        (("optim_grads_params", "no_shard"), (4, 0), [BF16], TOYS),
        *((pair, (2, 2), [BF16], UNEVEN) for pair in PAIRS),
        *(
            pytest.param((s, "no_shard"), (n, 0), POLICIES, TOYS, marks=pytest.mark.nightly)
            for s in STRATEGIES
            for n in GROUP_SIZES
        ),
        *(
            pytest.param(pair, (WORLD // n, n), POLICIES, TOYS, marks=pytest.mark.nightly)
            for pair in PAIRS
            for n in (1, 2, 4)
        ),
    ],
)
def test_the_ledger_equals_the_table_to_the_byte(
    strategy: tuple[str, str], meshes: tuple[int, int], policies: list[Dtypes], names: list[str]
) -> None:
    for name, dtypes in product(names, policies):
        compare(name, strategy, meshes, dtypes)


@pytest.mark.parametrize(
    ("strategy", "meshes", "allocation"),
    [
        (("optim_grads", "no_shard"), (2, 0), AllocationConfig("max_pool", 3)),
        (("optim_grads_params", "no_shard"), (2, 0), AllocationConfig("fixed_pool", 2)),
        (
            *(("optim_grads_params", "no_shard"), (2, 0)),
            AllocationConfig("fixed_pool", 2, persistent_fallback=True),
        ),
        # The pool of the outer reduction is counted too.
        (("optim_grads_params", "no_shard"), (2, 2), AllocationConfig("max_pool", 2)),
        (("optim_grads_params", "optim"), (2, 2), AllocationConfig("max_pool", 2)),
    ],
)
def test_pools_are_counted_to_the_byte_from_the_start(
    strategy: tuple[str, str], meshes: tuple[int, int], allocation: AllocationConfig
) -> None:
    for name in ("unequal_units", "conv_linear"):
        compare(name, strategy, meshes, BF16, allocation)
