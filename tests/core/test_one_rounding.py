"""One name, one rounding: `reduce_dtype` decides the numbers, whatever carries the bytes.

BF16 on the wire and FP32 main gradients, where the roundings differ. Where ranks add up in the same
order, in rank order or two of them, gradients have the same bits on every transport.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from conformance.judging import same
from mfsdp_core import MixedPrecisionPolicy
from mfsdp_core.errors import ConfigurationError
from oracle.hybrid import PAIRS, hybrid
from oracle.models import build
from oracle.reference import Named, raw_gradients
from oracle.rounding import accumulate_then_reduce, reduce_then_accumulate
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.on_ranks

F32, B16 = torch.float32, torch.bfloat16
NAME = "linear_stack"
TRANSPORTS = ("auto", "native", "point_to_point")
MICROBATCHES = 3


def gradients(make: Any, reduce: torch.dtype | None, transport: str) -> Named:
    """Whole gradients after a cycle."""
    policy = MixedPrecisionPolicy(F32, F32, B16, reduce_dtype=reduce)
    toy = make(mixed_precision_policy=policy, transport=transport)
    toy.run_cycle(MICROBATCHES)
    found: Named = toy.full_gradient()
    return found


def compare(make: Any, reduce: torch.dtype | None, transports: tuple[str, ...]) -> None:
    """Gradients of `transports` with those of direct exchange, to the bit."""
    wanted = gradients(make, reduce, "point_to_point")
    for transport in transports:
        same(transport, gradients(make, reduce, transport), wanted)


@pytest.mark.sample
@pytest.mark.parametrize("reduce", [None, F32, B16], ids=["default", "fp32", "bf16"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_transport_gives_the_bits_that_the_name_says(
    strategy: str, size: int, reduce: torch.dtype | None
) -> None:
    if size == 4 and reduce == B16 and strategy == "no_shard":
        return  # auto on gloo is native there, in an order of gloo's
    # Native collectives add more than two up in an order of their own.
    as_sent = reduce == B16 and size == 2
    transports = tuple(one for one in TRANSPORTS if one != "native" or as_sent)
    compare(partial(shard, NAME, strategy, size, F32), reduce, transports)


@pytest.mark.sample
@pytest.mark.parametrize("reduce", [None, B16], ids=["default", "bf16"])
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_every_transport_gives_the_bits_that_the_name_says_on_two_axes(
    inner: str, outer: str, reduce: torch.dtype | None
) -> None:
    transports = TRANSPORTS if reduce == B16 else ("auto",)
    compare(partial(hybrid, inner, outer, 2, F32, NAME), reduce, transports)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_four_ranks_add_up_in_rank_order_and_in_the_named_dtype(strategy: str) -> None:
    """Direct exchange, BF16 in BF16."""
    found = gradients(partial(shard, NAME, strategy, 4, F32), B16, "point_to_point")
    raw = raw_gradients(build(NAME, F32), NAME, 4, MICROBATCHES, F32)
    stage = accumulate_then_reduce if strategy == "optim" else reduce_then_accumulate
    for name, wanted in stage(raw, F32, B16, total=B16, travels=False).items():
        same(name, found[name], wanted)


@pytest.mark.parametrize(
    ("reduce", "comm", "arguments", "words"),
    [
        (
            *(None, B16, {"transport": "native"}),
            "travel in torch.bfloat16 were to be added up in torch.float32.*"
            "reduce_dtype=torch.bfloat16",
        ),
        (
            *(B16, F32, {}),
            r"which holds less. Pass MixedPrecisionPolicy\(reduce_dtype=torch.float32\)",
        ),
        (
            *(F32, B16, {"cuda_graph_mode": True, "fsdp_double_buffer": True}),
            "nccl_ub and cuda_graph_mode use the backend's collectives",
        ),
    ],
)
def test_what_a_backend_cannot_do_is_refused_with_the_setting_that_it_can(
    reduce: torch.dtype | None, comm: torch.dtype, arguments: dict[str, Any], words: str
) -> None:
    policy = MixedPrecisionPolicy(F32, F32, comm, reduce_dtype=reduce)
    with pytest.raises(ConfigurationError, match=words):
        shard(NAME, 3, 2, F32, mixed_precision_policy=policy, **arguments)
