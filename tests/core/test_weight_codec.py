"""Codecs of weights that travel encoded: passed as an object, on real ranks, in every strategy."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.testing.toy_models import Stack
from conformance.judging import same
from mfsdp_core import (
    Float8Reference,
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError
from oracle.models import TOYS
from oracle.ranks import mesh
from oracle.sharded import STRATEGIES, shard, weights_seen
from oracle.toy_codecs import DoubledBack, Matrices, ScaledBytes, TwoPayloads, from_bytes, to_bytes

pytestmark = pytest.mark.on_ranks

F32, B16 = torch.float32, torch.bfloat16
NAMES = ("conv_linear", "frozen", "tied_embedding", "unequal_units")


def policy(codec: Any, main: torch.dtype = F32) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(main, weight_codec=codec)


@pytest.mark.sample
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("allocator", [None, "max_pool", "fixed_pool"])
def test_a_lossless_codec_trains_to_the_bit_like_none(name: str, allocator: str | None) -> None:
    """The cases of `validate` train on codes that units gather without a pool."""
    options = {"allocator": allocator, "enable_fine_grained_param_gather": allocator is None}
    make = partial(shard, name, 1 if allocator == "fixed_pool" else 3, 2, **options)
    plain, coded = make(), make(mixed_precision_policy=policy(TwoPayloads()))
    same("training", coded.trained(2), plain.trained(2))


def quantised(whole: torch.Tensor) -> torch.Tensor:
    """A tensor that no rank shares, there and back; vectors stay as they are."""
    if whole.dim() < 2:
        return whole
    largest = whole.abs().max().float()
    return from_bytes(to_bytes(whole, largest), largest)


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
    strategy: str, size: int, dtype: torch.dtype
) -> None:
    for name in NAMES if size == 2 else NAMES[:2]:
        toy = shard(name, strategy, size, dtype, mixed_precision_policy=policy(ScaledBytes()))
        assert all(value < 1e6 for value in toy.trained(1) if isinstance(value, float))
        main, seen = toy.full_parameters(), weights_seen(toy)
        assert len(seen) >= len(TOYS[name].units)
        for key, value in seen.items():
            if key in main:  # a tied weight goes by its first name
                same(f"{name} {key}", value, quantised(main[key]).to(dtype))


def test_an_object_that_is_no_codec_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="found no payloads, for_bucket"):
        MixedPrecisionPolicy(weight_codec=Matrices())  # type: ignore[arg-type]


@pytest.mark.sample
@pytest.mark.parametrize("by_module", [False, True])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads", "optim_grads_params"])
def test_recomputation_reads_the_rows_and_the_backward_pass_the_columns(
    strategy: str, by_module: bool
) -> None:
    """Losses and weights of two cycles are those without recomputation."""
    arguments: dict[str, Any] = {"enable_fine_grained_param_gather": by_module}
    arguments["mixed_precision_policy"] = policy(DoubledBack())
    recomputing, plain = (shard("recomputed", strategy, 2, **arguments) for _ in range(2))
    plain.model.module.hidden = MethodType(Stack.hidden, plain.model.module)
    same("training", recomputing.trained(2), plain.trained(2))


class Inner(nn.Module):
    """A unit that recomputes a part of itself."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 64), nn.Linear(64, 6)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(self.first, x, use_reentrant=False) if self.recomputes else self.first(x)
        return self.second(inner.tanh())


def recomputing_inside(by_module: bool, recomputes: bool) -> list[torch.Tensor]:
    """Gradients of shards."""
    torch.manual_seed(0)
    model = fully_shard_model(
        nn.Sequential(nn.Linear(6, 6), Inner(recomputes)),
        device_mesh=mesh(2),
        dp_shard_dim="dp",
        fsdp_unit_modules=[Inner],
        mixed_precision_policy=policy(DoubledBack()),
        enable_fine_grained_param_gather=by_module,
    )
    model(torch.linspace(-1, 1, 12).view(2, 6)).square().mean().backward()
    model.finish_grad_sync()
    return [p.grad.to_local().clone() for p in model.parameters()]


def test_recomputation_inside_of_a_unit_is_refused_unless_modules_gather() -> None:
    same("gradients", recomputing_inside(True, True), recomputing_inside(True, False))
    with pytest.raises(CapabilityNotBuiltError, match="enable_fine_grained_param_gather=True"):
        recomputing_inside(False, True)


@pytest.mark.sample
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_no_whole_fp32_copy_of_a_quantised_weight_is_alive(recipe: str, strategy: str) -> None:
    """Of the most bytes that a bucket of a unit's matrices booked at once, by category."""
    codec = Float8Reference(recipe)  # type: ignore[arg-type]
    toy = shard("linear_stack", strategy, 2, B16, mixed_precision_policy=policy(codec))
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
    # The matrices of a unit have 2 x 6 x 10 elements: 240 B decoded to BF16, 480 B in FP32.
    assert found["main_weights"] <= 480 * 3 // 4, found
    assert 240 <= found["compute_weights"] < 480, found
