"""The optimizer for decoupled gradients computes what torch's AdamW computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.engines.precision_aware_adamw import PrecisionAwareAdamW

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


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    weight = nn.Parameter(start())
    PrecisionAwareAdamW([weight], **OPTIONS).step()
    assert torch.equal(weight.detach(), start())
