"""Type promotion in reductions and accumulations: the relations of Megatron-LM pull request 3067.

Its appendix prints, for one sample each, which ways to reduce or to accumulate tensors of one dtype
into another agree. Here are the relations themselves, of torch, on many samples. The gradients of
the core, whose roundings they decide, are those of `test_oracle_dtypes.py`.

    FP32 into BF16   reduce, then cast  ==  add the FP32 sum to a BF16 tensor  !=  cast, then reduce
    BF16 into FP32   cast, then reduce  ==  add BF16 tensors to an FP32 one    !=  reduce, then cast
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

F32, B16 = torch.float32, torch.bfloat16
SAMPLES = 200


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
