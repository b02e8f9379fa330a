"""One name, one rounding: `reduce_dtype` decides the numbers, whatever carries the bytes.

BF16 on the wire and FP32 main gradients, where the roundings differ. Where ranks add up in the same
order, in rank order or two of them, gradients have the same bits on every transport.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy
from mfsdp_core.errors import ConfigurationError
from oracle.hybrid import PAIRS, hybrid
from oracle.models import build
from oracle.ranks import RankPool
from oracle.reference import Named, raw_gradients
from oracle.rounding import accumulate_then_reduce, reduce_then_accumulate
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes

F32, B16 = torch.float32, torch.bfloat16
NAME = "linear_stack"
TRANSPORTS = ("auto", "native", "point_to_point")
MICROBATCHES = 3


def policy(reduce: torch.dtype | None, main: torch.dtype = F32) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(F32, main, B16, reduce_dtype=reduce)


def gradients(make: Any, reduce: torch.dtype | None, transport: str) -> Named:
    """Whole gradients after a cycle."""
    toy = make(mixed_precision_policy=policy(reduce), transport=transport)
    toy.run_cycle(MICROBATCHES)
    found: Named = toy.full_gradient()
    return found


def apart(make: Any, reduce: torch.dtype | None, transports: tuple[str, ...]) -> list[str]:
    """Transports whose gradients are not those of direct exchange, to the bit."""
    wanted = gradients(make, reduce, "point_to_point")
    return [
        transport
        for transport in transports
        if any(
            not torch.equal(value, wanted[name])
            for name, value in gradients(make, reduce, transport).items()
        )
    ]


def on_one_axis(strategy: str, size: int, reduce: torch.dtype | None) -> list[str]:
    def make(**arguments: Any) -> Any:
        return shard(NAME, strategy, size, F32, **arguments)

    # Native collectives add more than two up in an order of their own.
    as_sent = reduce == B16 and size == 2
    return apart(make, reduce, tuple(one for one in TRANSPORTS if one != "native" or as_sent))


def on_two_axes(inner: str, outer: str, reduce: torch.dtype | None) -> list[str]:
    def make(**arguments: Any) -> Any:
        return hybrid(inner, outer, 2, F32, NAME, **arguments)

    return apart(make, reduce, TRANSPORTS if reduce == B16 else ("auto",))


def in_rank_order(strategy: str) -> bool:
    """Whether direct exchange of four ranks adds BF16 up in BF16, in rank order."""
    toy = shard(
        NAME, strategy, 4, F32, mixed_precision_policy=policy(B16), transport="point_to_point"
    )
    toy.run_cycle(MICROBATCHES)
    raw = raw_gradients(build(NAME, F32), NAME, 4, MICROBATCHES, F32)
    stage = accumulate_then_reduce if strategy == "optim" else reduce_then_accumulate
    wanted, found = stage(raw, F32, B16, total=B16, travels=False), toy.full_gradient()
    return all(torch.equal(found[name], value) for name, value in wanted.items())


def refused(reduce: torch.dtype | None, comm: torch.dtype, arguments: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as error:
        shard(
            NAME,
            3,
            2,
            F32,
            mixed_precision_policy=MixedPrecisionPolicy(F32, F32, comm, reduce_dtype=reduce),
            **arguments,
        )
    return str(error.value)


@pytest.mark.sample
@pytest.mark.parametrize("reduce", [None, F32, B16], ids=["default", "fp32", "bf16"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_transport_gives_the_bits_that_the_name_says(
    ranks: RankPool, strategy: str, size: int, reduce: torch.dtype | None
) -> None:
    if size == 4 and reduce == B16 and strategy == "no_shard":
        return  # auto on gloo is native there, in an order of gloo's
    assert ranks.run(on_one_axis, strategy, size, reduce)[0] == []


@pytest.mark.sample
@pytest.mark.parametrize("reduce", [None, B16], ids=["default", "bf16"])
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_every_transport_gives_the_bits_that_the_name_says_on_two_axes(
    ranks: RankPool, inner: str, outer: str, reduce: torch.dtype | None
) -> None:
    assert ranks.run(on_two_axes, inner, outer, reduce)[0] == []


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_four_ranks_add_up_in_rank_order_and_in_the_named_dtype(
    ranks: RankPool, strategy: str
) -> None:
    assert ranks.run(in_rank_order, strategy) == [True] * 4


def test_what_a_backend_cannot_do_is_refused_with_the_setting_that_it_can(ranks: RankPool) -> None:
    for message in ranks.run(refused, None, B16, {"transport": "native"}):
        assert "travel in torch.bfloat16 were to be added up in torch.float32" in message
        assert "reduce_dtype=torch.bfloat16" in message
    for message in ranks.run(refused, B16, F32, {}):
        assert "which holds less. Pass MixedPrecisionPolicy(reduce_dtype=torch.float32)" in message
    captured = {"cuda_graph_mode": True, "fsdp_double_buffer": True}
    for message in ranks.run(refused, F32, B16, captured):
        assert "nccl_ub and cuda_graph_mode use the backend's collectives" in message
