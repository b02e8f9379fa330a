"""Codecs of weights that travel encoded: passed as an object, on real ranks, in every strategy."""

from __future__ import annotations

from collections import Counter
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.testing.toy_models import Stack
from mfsdp_core import (
    Float8Reference,
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.memory_model import PolicyNames, memory_at_rest
from mfsdp_core.plan.strategy import parse_strategy
from oracle.facts import facts_of
from oracle.hybrid import PAIRS, hybrid
from oracle.models import TOYS
from oracle.ranks import WORLD, RankPool, mesh
from oracle.seen_weights import weights_seen
from oracle.sharded import STRATEGIES, Sharded, shard
from oracle.toy_codecs import DoubledBack, Matrices, ScaledBytes, TwoPayloads, from_bytes, to_bytes

pytestmark = pytest.mark.processes

F32, B16 = torch.float32, torch.bfloat16
NAMES = ("conv_linear", "frozen", "tied_embedding", "unequal_units")


def trained(toy: Sharded, cycles: int = 3) -> list[Any]:
    """Losses of all microbatches, then the whole main weights: a codec cuts other shards."""
    trainable = [p for p in toy.model.parameters() if p.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(trainable, lr=0.01, foreach=False))
    found: list[Any] = []
    for cycle in range(cycles):
        for microbatch in range(2):
            with toy.model.sync() if microbatch else toy.model.no_sync():
                found.append(toy.backward(microbatch, cycle))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *toy.full_parameters().values()]


def policy(codec: Any, main: torch.dtype = F32) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(main, weight_codec=codec)


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def lossless_differs(strategy: str, size: int, arguments: dict[str, Any]) -> list[str]:
    """In a rank: models that train otherwise than without the codec."""
    return [
        name
        for name in NAMES
        if not equal(
            trained(shard(name, strategy, size, **arguments)),
            trained(
                shard(
                    name, strategy, size, mixed_precision_policy=policy(TwoPayloads()), **arguments
                )
            ),
        )
    ]


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        *(pytest.param(strategy, {}, marks=pytest.mark.nightly) for strategy in STRATEGIES[1:]),
        (STRATEGIES[0], {}),
        pytest.param(
            *("optim_grads_params", {"allocator": "temporary"}), marks=pytest.mark.nightly
        ),
        ("optim_grads_params", {"allocator": "max_pool"}),
        ("optim_grads_params", {"enable_fine_grained_param_gather": True}),
    ],
)
def test_a_lossless_codec_trains_to_the_bit_like_none(
    ranks: RankPool, strategy: str, arguments: dict[str, Any]
) -> None:
    assert ranks.run(lossless_differs, strategy, 2, arguments) == [[]] * WORLD


def hybrid_differs(inner: str, outer: str) -> list[str]:
    """In a rank."""
    coded = policy(TwoPayloads())
    return [
        name
        for name in NAMES
        if not equal(
            trained(hybrid(inner, outer, 2, F32, name)),
            trained(hybrid(inner, outer, 2, F32, name, mixed_precision_policy=coded)),
        )
    ]


@pytest.mark.sample
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_a_lossless_codec_trains_to_the_bit_like_none_on_two_axes(
    ranks: RankPool, inner: str, outer: str
) -> None:
    assert ranks.run(hybrid_differs, inner, outer) == [[]] * WORLD


def quantised(whole: torch.Tensor) -> torch.Tensor:
    """A tensor that no rank shares, there and back; vectors stay as they are."""
    if whole.dim() < 2:
        return whole
    largest = whole.abs().max().float()
    return from_bytes(to_bytes(whole, largest), largest)


def decoded_differs(strategy: str, size: int, dtype: torch.dtype) -> list[str]:
    """In a rank: weights that modules see and that are not the whole tensor, quantised alone."""
    found = []
    for name in NAMES:
        toy = shard(name, strategy, size, dtype, mixed_precision_policy=policy(ScaledBytes()))
        assert all(value < 1e6 for value in trained(toy) if isinstance(value, float))
        main, seen = toy.full_parameters(), weights_seen(toy)
        assert len(seen) >= len(TOYS[name].units)
        found += [
            f"{name} {key}"
            for key, value in seen.items()
            if key in main  # a tied weight goes by its first name
            if not torch.equal(quantised(main[key]).to(dtype), value)
        ]
    return found


@pytest.mark.sample
@pytest.mark.parametrize(
    ("strategy", "size", "dtype"),
    [
        *((strategy, 2, B16) for strategy in STRATEGIES),
        ("optim_grads_params", 1, B16),
        ("optim_grads_params", 4, F32),
    ],
)
def test_every_rank_computes_with_the_codes_of_the_whole_tensor(
    ranks: RankPool, strategy: str, size: int, dtype: torch.dtype
) -> None:
    assert ranks.run(decoded_differs, strategy, size, dtype) == [[]] * WORLD


def gathers(codec: Any) -> Counter[tuple[str, str, int]]:
    """In a rank: what units gather in one forward and backward pass."""
    toy = shard("linear_stack", "optim_grads_params", 2, mixed_precision_policy=policy(codec))
    toy.run_cycle(1)
    toy.model.wire_log.clear()
    toy.run_cycle(1)
    return Counter(
        (r.bucket, r.dtype, r.payload_bytes)
        for r in toy.model.wire_log
        if r.operation == "all_gather" and r.bucket.startswith("blocks.")
    )


@pytest.mark.parametrize(("codec", "bytes_each"), [(ScaledBytes(), 1), (TwoPayloads(), 4)])
def test_a_gather_sends_the_payload_of_its_pass_and_nothing_else(
    ranks: RankPool, codec: Any, bytes_each: int
) -> None:
    # A unit has matrices of 10 x 6 and 6 x 10, and vectors of 6, 6 and 10 elements.
    expected = Counter(
        {
            (f"blocks.{unit}/{number}", dtype, size): 2
            for unit in range(3)
            for number, dtype, size in [(0, "float32", 4 * 22), (1, "uint8", 120 * bytes_each)]
        }
    )
    assert ranks.run(gathers, codec) == [expected] * WORLD


def ledger_differs(strategy: str, dtype: torch.dtype) -> list[str]:
    """In a rank: toys whose memory at rest is not the model's, to the byte."""
    found = []
    coordinate = Coordinate(mesh(2).get_local_rank("dp"), 2)
    for name in NAMES:
        for codec in (ScaledBytes(), TwoPayloads()):
            toy = shard(name, strategy, 2, dtype, mixed_precision_policy=policy(codec))
            expected = memory_at_rest(
                facts_of(name, dtype),
                parse_strategy(strategy),
                coordinate,
                PolicyNames(),
                codec=codec,
            )
            if toy.model.ledger.bytes_by_category() != expected.bytes_by_category():
                found.append(f"{name}: {toy.model.ledger.bytes_by_category()} {expected}")
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_payloads_are_counted_to_the_byte(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(ledger_differs, strategy, F32) == [[]] * WORLD


def test_an_object_that_is_no_codec_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="found no payloads, for_bucket"):
        MixedPrecisionPolicy(weight_codec=Matrices())  # type: ignore[arg-type]


def recomputed_differs(strategy: str, codec: Any, arguments: dict[str, Any]) -> list[str]:
    """In a rank: what recomputation changes, of losses and gradients of two cycles."""
    found = []
    results = []
    for recomputes in (True, False):
        toy = shard("recomputed", strategy, 2, mixed_precision_policy=policy(codec), **arguments)
        if not recomputes:
            toy.model.module.hidden = MethodType(Stack.hidden, toy.model.module)
        results.append(trained(toy, cycles=2))
    if not equal(*results):
        found.append(strategy)
    return found


@pytest.mark.sample
@pytest.mark.parametrize("by_module", [False, True])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads", "optim_grads_params"])
def test_recomputation_reads_the_rows_and_the_backward_pass_the_columns(
    ranks: RankPool, strategy: str, by_module: bool
) -> None:
    arguments = {"enable_fine_grained_param_gather": by_module}
    assert ranks.run(recomputed_differs, strategy, DoubledBack(), arguments) == [[]] * WORLD


class Inner(nn.Module):
    """A unit that recomputes a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 64), nn.Linear(64, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False).tanh())


def recomputing_inside(by_module: bool) -> tuple[str, bool]:
    """In a rank: what it says, and whether gradients are those without recomputation."""
    gradients = []
    for recomputes in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 6), Inner())
        if not recomputes:
            module[1].forward = lambda x, m=module[1]: m.second(m.first(x).tanh())
        model = fully_shard_model(
            module,
            device_mesh=mesh(2),
            dp_shard_dim="dp",
            fsdp_unit_modules=[Inner],
            mixed_precision_policy=policy(DoubledBack()),
            enable_fine_grained_param_gather=by_module,
        )
        try:
            model(torch.linspace(-1, 1, 12).view(2, 6)).square().mean().backward()
        except CapabilityNotBuiltError as error:
            return str(error), False
        model.finish_grad_sync()
        gradients.append([p.grad.to_local().clone() for p in model.parameters()])
    return "", equal(*gradients)


def test_recomputation_inside_of_a_unit_is_refused_unless_modules_gather(ranks: RankPool) -> None:
    assert ranks.run(recomputing_inside, True) == [("", True)] * WORLD
    for said, _ in ranks.run(recomputing_inside, False):
        assert "enable_fine_grained_param_gather=True" in said


def largest_bookings(recipe: str, strategy: str) -> dict[str, int]:
    """In a rank: the most bytes that a bucket of a unit's matrices booked at once, by category."""
    policy = MixedPrecisionPolicy(torch.float32, weight_codec=Float8Reference(recipe))
    toy = shard("linear_stack", strategy, 2, torch.bfloat16, mixed_precision_policy=policy)
    seen = [*toy.model.ledger.alive()]
    toy.model.ledger.subscribe(seen.append)
    optimizer = fully_shard_optimizer(torch.optim.SGD(toy.model.parameters(), lr=0.1))
    for cycle in range(2):
        toy.run_cycle(1, cycle)
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, int] = {}
    for booking in seen:
        if booking.bucket == "blocks.0/1":
            found[booking.category] = max(found.get(booking.category, 0), booking.count_bytes)
    return found


@pytest.mark.sample
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_no_whole_fp32_copy_of_a_quantised_weight_is_alive(
    ranks: RankPool, recipe: str, strategy: str
) -> None:
    # The matrices of a unit have 2 x 6 x 10 elements: 240 B decoded to BF16, 480 B in FP32.
    for found in ranks.run(largest_bookings, recipe, strategy):
        assert found["main_weights"] <= 480 * 3 // 4
        assert 240 <= found["compute_weights"] < 480
