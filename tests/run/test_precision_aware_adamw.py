"""The optimizer for decoupled gradients computes what torch's AdamW computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.engines.precision_aware_adamw import PrecisionAwareAdamW, joined, split_into

OPTIONS = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 5


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(7, 5, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def start() -> torch.Tensor:
    return torch.linspace(-2, 2, 35, dtype=torch.float64).view(7, 5)


def torch_weights(dtype: torch.dtype) -> torch.Tensor:
    weight = nn.Parameter(start().to(dtype))
    optimizer = torch.optim.AdamW([weight], **OPTIONS)
    for gradient in gradients():
        weight.grad = gradient.to(dtype)
        optimizer.step()
    return weight.detach()


def our_weights(
    dtype: torch.dtype, gradient_dtype: torch.dtype, **settings: object
) -> tuple[torch.Tensor, PrecisionAwareAdamW]:
    weight = nn.Parameter(start().to(dtype))
    optimizer = PrecisionAwareAdamW([weight], **OPTIONS, **settings)
    for gradient in gradients():
        weight.decoupled_grad = gradient.to(gradient_dtype)
        optimizer.step()
        optimizer.zero_grad()
        assert weight.decoupled_grad is None
    return weight.detach(), optimizer


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-7)])
def test_weights_follow_torch_adamw(dtype: torch.dtype, rtol: float) -> None:
    found, _ = our_weights(dtype, dtype, state_dtype=dtype)
    torch.testing.assert_close(found, torch_weights(dtype), rtol=rtol, atol=rtol)


def test_a_bf16_gradient_updates_an_fp32_weight_in_fp32() -> None:
    found, _ = our_weights(torch.float32, torch.bfloat16)
    weight = nn.Parameter(start().float())
    optimizer = torch.optim.AdamW([weight], **OPTIONS)
    for gradient in gradients():
        weight.grad = gradient.bfloat16().float()
        optimizer.step()
    torch.testing.assert_close(found, weight.detach(), rtol=1e-6, atol=1e-6)


def test_bf16_weights_with_master_weights_lose_nothing_between_steps() -> None:
    exact, _ = our_weights(torch.float32, torch.float32)
    with_master, _ = our_weights(torch.bfloat16, torch.float32, master_weights=True)
    without, _ = our_weights(torch.bfloat16, torch.float32)
    # The start is rounded once; from there on only the copy that is shown is.
    assert (with_master.float() - exact).abs().max() < 0.02
    assert (without.float() - exact).abs().max() > (with_master.float() - exact).abs().max()


def test_state_takes_the_bytes_it_was_told_to() -> None:
    def state_bytes(**settings: object) -> int:
        _, optimizer = our_weights(torch.float32, torch.float32, **settings)
        tensors = (v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))
        return sum(tensor.nbytes for tensor in tensors)

    elements = 7 * 5
    assert state_bytes() == 8 * elements
    assert state_bytes(state_dtype=torch.bfloat16) == 4 * elements
    assert state_bytes(master_weights=True) == 12 * elements


def test_remainders_train_bf16_weights_to_the_bit_like_an_fp32_copy_of_them() -> None:
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(64, 33, generator=generator).to(torch.bfloat16)
    gradients = [torch.randn(64, 33, generator=generator) * 10.0**-step for step in range(6)]
    found = []
    for settings in ({"master_weights": True}, {"store_remainders": True}):
        weight = nn.Parameter(start.clone())
        optimizer = PrecisionAwareAdamW([weight], lr=1e-3, **settings)
        for gradient in gradients:
            weight.decoupled_grad = gradient.clone()
            optimizer.step()
        state = optimizer.state[weight]
        found.append((weight.detach(), state))
    (_, copy), (weight, split) = found
    assert torch.equal(joined(weight, split["remainder"]), copy["master_param"])
    assert not torch.equal(weight.float(), copy["master_param"])
    assert split["remainder"].dtype == torch.int16


def test_bits_survive_being_split_and_joined() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(1))
    whole = bits.to(torch.int32).view(torch.float32)
    whole = whole[whole.isfinite() & (whole.abs() < 1e38) & (whole.abs() > 1e-30)]
    weight = torch.empty_like(whole, dtype=torch.bfloat16)
    remainder = torch.empty_like(whole, dtype=torch.int16)
    split_into(whole, weight, remainder)
    assert torch.equal(joined(weight, remainder).view(torch.int32), whole.view(torch.int32))
    assert float(((weight.float() - whole) / whole).abs().max()) <= 2**-8


def test_two_ways_to_keep_fp32_weights_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="instead of master_weights"):
        PrecisionAwareAdamW(
            [nn.Parameter(torch.ones(2))], master_weights=True, store_remainders=True
        )
    fp32 = nn.Parameter(torch.ones(2))
    fp32.grad = torch.ones(2)
    with pytest.raises(ValueError, match="for bfloat16 weights, not "):
        PrecisionAwareAdamW([fp32], store_remainders=True).step()
