"""Codecs of weights that travel encoded: passed as an object, on real ranks, in every strategy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy, fully_shard_optimizer
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
from oracle.toy_codecs import Matrices, ScaledBytes, TwoPayloads, from_bytes, to_bytes

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
        *((strategy, {}) for strategy in STRATEGIES),
        ("optim_grads_params", {"allocator": "temporary"}),
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


def recomputing() -> str:
    """In a rank: what it says about two payloads under recomputation."""
    toy = shard("recomputed", "optim_grads_params", 2, mixed_precision_policy=policy(TwoPayloads()))
    try:
        toy.run_cycle(1)
    except CapabilityNotBuiltError as error:
        return str(error)
    return "no error"


def test_two_payloads_under_recomputation_are_refused(ranks: RankPool) -> None:
    for said in ranks.run(recomputing):
        assert "do not recompute this unit" in said
