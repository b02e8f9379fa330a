"""Type promotion in reductions and accumulations: the relations of Megatron-LM pull request 3067.

Its appendix prints, for one sample each, which ways to reduce or to accumulate tensors of one dtype
into another agree. First the relations themselves, of torch, on many samples; then the gradients of
the core, whose roundings they decide. The gradients are the inputs, so everything is known.

    FP32 into BF16   reduce, then cast  ==  add the FP32 sum to a BF16 tensor  !=  cast, then reduce
    BF16 into FP32   cast, then reduce  ==  add BF16 tensors to an FP32 one    !=  reduce, then cast
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model
from oracle.models import KnownGradient
from oracle.ranks import RankPool, mesh
from oracle.sharded import Sharded

F32, B16 = torch.float32, torch.bfloat16
SHAPE = (4, 2)
SAMPLES = 200
WHOLE = ["no_shard", "optim"]
SHARDED = ["optim_grads", "optim_grads_params"]


def sample(seed: int, dtype: torch.dtype, count: int = 5, shape: tuple[int, ...] = (16,)) -> Tensor:
    """[count, *shape] of normal values of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, *shape, generator=generator)
    return (values * torch.logspace(-1, 2, shape[-1])).to(dtype)


def one_after_the_other(tensors: Tensor, dtype: torch.dtype) -> Tensor:
    """0 + t0 + t1 + ... in a tensor of `dtype`, by in-place additions."""
    total = torch.zeros(tensors.shape[1:], dtype=dtype)
    for tensor in tensors:
        total.add_(tensor)
    return total


def in_steps_of(tensors: Tensor, dtype: torch.dtype) -> Tensor:
    """The same with every summand, and every sum, rounded to `dtype`."""
    total = torch.zeros(tensors.shape[1:], dtype=dtype)
    for tensor in tensors:
        total = (total.float() + tensor.to(dtype).float()).to(dtype)
    return total


def gradient(value: Tensor, strategy: str, transport: str, *policy: torch.dtype) -> Tensor:
    """In a rank of two: the whole gradient where rank r has `value[j][r]` in microbatch j."""
    compute, main, comm = policy
    module = torch.nn.Sequential(KnownGradient()).to(compute)
    arguments: dict[str, Any] = {"fsdp_unit_modules": [KnownGradient]}
    model = fully_shard_model(
        module,
        device_mesh=mesh(2),
        dp_shard_dim="dp",
        zero_dp_strategy=strategy,
        sync_model_each_microbatch=False,
        mixed_precision_policy=MixedPrecisionPolicy(
            F32, main, comm, reduce_dtype=comm if transport == "native" else None
        ),
        transport=transport,  # type: ignore[arg-type]
        **arguments,
    )
    rank = mesh(2).get_local_rank("dp")
    for microbatch in value:
        model(microbatch[rank]).backward()
    model.finish_grad_sync()
    return Sharded("", 2, compute, model).full_gradient()["0.weight"]


def inputs(dtype: torch.dtype, microbatches: int) -> Tensor:
    """[microbatch, rank, *SHAPE]."""
    return sample(7, dtype, microbatches * 2, SHAPE).view(microbatches, 2, *SHAPE)


@pytest.mark.parametrize("seed", range(3))
def test_fp32_into_bf16_is_computed_in_fp32_and_rounded_once_per_addition(seed: int) -> None:
    tensors = sample(seed, F32, SAMPLES)
    promoted = torch.zeros(16, dtype=B16).add_(tensors.sum(0))
    assert torch.equal(promoted, tensors.sum(0).to(B16))
    assert not torch.equal(promoted, one_after_the_other(tensors.to(B16), B16))
    accumulator = tensors[0].to(B16)
    sums = accumulator.clone().add_(tensors[1])
    assert torch.equal(sums, torch.stack([accumulator.float(), tensors[1]]).sum(0).to(B16))
    assert not torch.equal(sums, accumulator + tensors[1].to(B16))


@pytest.mark.parametrize("seed", range(3))
def test_bf16_into_fp32_loses_nothing_that_a_sum_in_fp32_keeps(seed: int) -> None:
    tensors = sample(seed, B16, SAMPLES)
    promoted = one_after_the_other(tensors, F32)
    assert torch.equal(promoted, one_after_the_other(tensors.float(), F32))
    assert torch.allclose(promoted, tensors.sum(0, dtype=F32), rtol=1e-5, atol=1e-3)
    assert not torch.equal(promoted, in_steps_of(tensors, B16).float())
    assert not torch.equal(promoted, tensors.sum(0, dtype=B16).float())


@pytest.mark.processes
@pytest.mark.parametrize("strategy", SHARDED)
def test_sharded_bf16_main_gradients_reduce_in_fp32_then_cast(
    ranks: RankPool, strategy: str
) -> None:
    value = inputs(F32, 1)
    expected = (value[0].sum(0) / 2).to(B16)
    assert not torch.equal(expected, (value[0].to(B16).sum(0) / 2).to(B16))
    for found in ranks.run(gradient, value, strategy, "native", F32, B16, F32):
        assert torch.equal(found, expected.float())


@pytest.mark.processes
@pytest.mark.parametrize("strategy", WHOLE)
def test_whole_bf16_main_gradients_cast_then_reduce(ranks: RankPool, strategy: str) -> None:
    value = inputs(F32, 1)
    expected = (value[0].to(B16).float().sum(0) / 2).to(B16)
    assert not torch.equal(expected, (value[0].sum(0) / 2).to(B16))
    for found in ranks.run(gradient, value, strategy, "native", F32, B16, F32):
        assert torch.equal(found, expected.float())


@pytest.mark.processes
@pytest.mark.parametrize("strategy", SHARDED)
def test_a_reduced_fp32_gradient_is_added_to_bf16_by_promotion(
    ranks: RankPool, strategy: str
) -> None:
    value = inputs(F32, 2)
    reduced = value.sum(1) / 2
    expected = reduced[0].to(B16).add_(reduced[1])
    assert not torch.equal(expected, reduced[0].to(B16) + reduced[1].to(B16))
    for found in ranks.run(gradient, value, strategy, "native", F32, B16, F32):
        assert torch.equal(found, expected.float())


@pytest.mark.processes
@pytest.mark.parametrize("strategy", [*WHOLE, *SHARDED])
def test_a_native_bf16_reduction_rounds_and_a_direct_one_promotes(
    ranks: RankPool, strategy: str
) -> None:
    value = inputs(B16, 1)
    promoted = value[0].float().sum(0) / 2
    rounded = promoted.to(B16).float()
    assert not torch.equal(promoted, rounded)
    for found in ranks.run(gradient, value, strategy, "native", B16, F32, B16):
        assert torch.equal(found, rounded)
    # The sum of an all-reduce travels once more, in the communication dtype.
    direct = rounded if strategy == "no_shard" else promoted
    for found in ranks.run(gradient, value, strategy, "point_to_point", B16, F32, B16):
        assert torch.equal(found, direct)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", SHARDED)
def test_reduced_bf16_gradients_are_accumulated_in_fp32_without_loss(
    ranks: RankPool, strategy: str
) -> None:
    value = inputs(B16, 3)
    reduced = (value.float().sum(1) / 2).to(B16)
    expected = one_after_the_other(reduced, F32)
    assert not torch.equal(expected, in_steps_of(reduced, B16).float())
    for found in ranks.run(gradient, value, strategy, "native", B16, F32, B16):
        assert torch.equal(found, expected)
