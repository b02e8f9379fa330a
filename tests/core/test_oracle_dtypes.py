"""Roundings of mixed dtypes, against emulated reductions, on one axis and on two.

The emulation runs in one process on plain tensors and is met to the last bit, whatever carries the
bytes: `reduce_dtype` says in which dtype ranks add up. Native collectives add more than two ranks
up in an order of their own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_core import MixedPrecisionPolicy
from mfsdp_core.errors import ConfigurationError
from oracle import ranks
from oracle.hybrid import PAIRS, hybrid
from oracle.models import build
from oracle.ranks import WORLD
from oracle.reference import Named, raw_gradients
from oracle.rounding import (
    accumulate_then_reduce,
    outer_stage,
    reduce_then_accumulate,
    ulp_distance,
)
from oracle.sharded import STRATEGIES, Sharded, shard

pytestmark = pytest.mark.on_ranks

NAME, MICROBATCHES = "linear_stack", 3
Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]
#: Compute, main gradients, communication.
COMBINATIONS = [
    pytest.param((torch.float32, torch.float32, torch.bfloat16), id="compute32-main32-comm16"),
    pytest.param((torch.float32, torch.bfloat16, torch.float32), id="compute32-main16-comm32"),
    pytest.param((torch.float32, torch.bfloat16, torch.bfloat16), id="compute32-main16-comm16"),
    pytest.param((torch.bfloat16, torch.float32, torch.bfloat16), id="compute16-main32-comm16"),
    pytest.param((torch.bfloat16, torch.float32, torch.float32), id="compute16-main32-comm32"),
    pytest.param((torch.bfloat16, torch.bfloat16, torch.bfloat16), id="compute16-main16-comm16"),
]


def emulated(
    inner: str,
    outer: str | None,
    size: int,
    compute: torch.dtype,
    main: torch.dtype,
    comm: torch.dtype,
    total: torch.dtype,
) -> Named:
    """In one process. Ranks add up in `total`; an all-reduced sum travels once more."""
    raw = raw_gradients(build(NAME, compute), NAME, size, MICROBATCHES, compute)
    whole = inner in {"no_shard", "optim"}
    stage = accumulate_then_reduce if whole else reduce_then_accumulate
    row = size if outer is None else size // 2
    per_outer_rank = [
        stage(
            raw[first : first + row],
            main,
            comm,
            total=total,
            travels=inner == "no_shard",
            divisor=size,
        )
        for first in range(0, size, row)
    ]
    if outer is None:
        return per_outer_rank[0]
    return outer_stage(per_outer_rank, main, comm, total=total, travels=outer == "no_shard")


#: Transport, and the dtype in which ranks add up: that of the wire, the wider one of wire and main
#: gradients by default, or that one by name.
WAYS = [
    ("native", "wire"),
    ("point_to_point", "wire"),
    ("point_to_point", "default"),
    ("auto", "wire"),
    ("auto", "default"),
    ("auto", "named"),
]


def compare_emulated(
    inner: str, outer: str | None, size: int, dtypes: Dtypes, way: tuple[str, str], most: int = 0
) -> None:
    """A cycle with the emulation. most: apart, in ulps of the communication dtype."""
    compute, main, comm = dtypes
    transport, adds_up_in = way
    total = comm if adds_up_in == "wire" else torch.promote_types(main, comm)
    reduce = None if adds_up_in == "default" else total
    policy = MixedPrecisionPolicy(torch.float32, main, comm, reduce_dtype=reduce)
    options: dict[str, Any] = {"mixed_precision_policy": policy, "transport": transport}
    if outer is None:
        toy: Sharded = shard(NAME, inner, size, compute, **options)
    else:
        toy = hybrid(inner, outer, 2, compute, NAME, **options)
    toy.run_cycle(MICROBATCHES)
    found = toy.full_gradient()
    for key, wanted in emulated(inner, outer, size, compute, main, comm, total).items():
        ulps = ulp_distance(found[key], wanted, comm)
        assert ulps <= most, f"gradient of {key}: {ulps} ulps apart"


@pytest.mark.sample
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("dtypes", COMBINATIONS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_round_exactly_where_the_strategy_says_and_add_up_in_rank_order(
    strategy: str, size: int, dtypes: Dtypes, way: tuple[str, str]
) -> None:
    # Where whole gradients are added up in the dtype of the wire, `auto` is native on gloo.
    is_native = way[0] == "native" or (way == ("auto", "wire") and strategy == "no_shard")
    most = 3 * MICROBATCHES if is_native and size > 2 else 0
    compare_emulated(strategy, None, size, dtypes, way, most=most)


@pytest.mark.on_ranks(3)
@pytest.mark.parametrize("dtypes", [COMBINATIONS[0], *COMBINATIONS[3:5]])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_divisor_that_no_binary_number_holds_rounds_before_the_wire_and_once(
    strategy: str, dtypes: Dtypes
) -> None:
    mesh_of_three = init_device_mesh("cpu", (1, 3), mesh_dim_names=("replica", "dp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ranks._meshes, 3, mesh_of_three)
        compare_emulated(strategy, None, 3, dtypes, ("auto", "default"))


@pytest.mark.sample
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize(
    "dtypes", [one for one in COMBINATIONS if torch.bfloat16 in one.values[0][1:]]
)
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_gradients_are_rounded_once_more_for_the_outer_axis_and_nowhere_else(
    inner: str, outer: str, dtypes: Dtypes, way: tuple[str, str]
) -> None:
    compare_emulated(inner, outer, WORLD, dtypes, way)


@pytest.mark.parametrize(
    ("reduce", "comm", "arguments", "words"),
    [
        (
            *(None, torch.bfloat16, {"transport": "native"}),
            "travel in torch.bfloat16 were to be added up in torch.float32.*"
            "reduce_dtype=torch.bfloat16",
        ),
        (
            *(torch.bfloat16, torch.float32, {}),
            r"which holds less. Pass MixedPrecisionPolicy\(reduce_dtype=torch.float32\)",
        ),
        (
            *(torch.float32, torch.bfloat16),
            {"cuda_graph_mode": True, "fsdp_double_buffer": True},
            "nccl_ub and cuda_graph_mode use the backend's collectives",
        ),
    ],
)
def test_what_a_backend_cannot_do_is_refused_with_the_setting_that_it_can(
    reduce: torch.dtype | None, comm: torch.dtype, arguments: dict[str, Any], words: str
) -> None:
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, comm, reduce_dtype=reduce)
    with pytest.raises(ConfigurationError, match=words):
        shard(NAME, 3, 2, mixed_precision_policy=policy, **arguments)
