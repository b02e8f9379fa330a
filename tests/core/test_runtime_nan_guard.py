"""NaN and Inf in gradients: found before the reduction, with rank, parameter and microbatch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.judging import same
from mfsdp_core import MixedPrecisionPolicy, fully_shard_model
from mfsdp_core.errors import NonFiniteGradientError
from mfsdp_core.runtime.nan_guard import all_finite
from oracle.models import Block
from oracle.ranks import mesh_of_every_replica as mesh
from oracle.sharded import STRATEGIES

NAN, INF = float("nan"), float("inf")
CHECKS = ("report_nan_in_param_grad", "check_for_nan_in_grad")


class Given(torch.autograd.Function):
    """Passes x on; the gradient of `weight` is `gradient`, a fused kernel writes it by itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, gradient: Tensor, fused: bool) -> Tensor:
        ctx.weight, ctx.gradient, ctx.fused = weight, gradient, fused
        return x.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if not ctx.fused:
            return ctx.gradient, upstream, None, None
        target = ctx.weight.get_main_grad()
        if ctx.weight.overwrite_main_grad:
            target.copy_(ctx.gradient)
        else:
            target.add_(ctx.gradient)
        ctx.weight.grad_added_to_main_grad = True
        return torch.zeros_like(ctx.gradient), upstream, None, None


class Poisoned(Block):
    """A unit with a weight under two names whose gradient is whatever the caller says."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__(width=8, hidden=16)
        self.fused = fused
        self.weight = nn.Parameter(torch.ones(8))
        self.alias = self.weight

    def forward(self, x: Tensor, gradient: Tensor) -> Tensor:
        return Given.apply(self.weight, super().forward(x), gradient, self.fused)


class Chain(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Poisoned(fused=fused) for _ in range(3))

    def forward(self, x: Tensor, gradients: list[Tensor]) -> Tensor:
        for block, gradient in zip(self.blocks, gradients, strict=True):
            x = block(x, gradient)
        return x.sum()


def chain(strategy: str, fused: bool = False, **arguments: Any) -> Any:
    policy = arguments.pop("mixed_precision_policy", MixedPrecisionPolicy())
    torch.manual_seed(5)
    return fully_shard_model(
        Chain(fused=fused),
        device_mesh=mesh(2)["dp"],
        fsdp_unit_modules=[Poisoned],
        zero_dp_strategy=strategy,
        sync_model_each_microbatch=False,
        mixed_precision_policy=policy,
        **arguments,
    )


def run(model: Any, *, poison: float = 1.0, unit: int = 1) -> None:
    """A microbatch of one row whose gradient of `blocks.<unit>.weight` has one poisoned element."""
    gradients = [torch.ones(8) for _ in range(3)]
    gradients[unit][3] = poison
    model(torch.ones(1, 8), gradients).backward()


def accumulate(model: Any, *poisons: float) -> None:
    """A cycle of one microbatch for each."""
    for poison in poisons:
        with model.no_sync():
            run(model, poison=poison)
    model.finish_grad_sync()


def third_microbatch(strategy: str, check: str, poison: float, fused: bool) -> str:
    """What is said of poison there; a cycle after zero_grad is clean, and counts from 0 again."""
    model = chain(strategy, fused, **{check: True})
    at_rest = model.ledger.bytes_by_category()
    with pytest.raises(NonFiniteGradientError) as caught:
        accumulate(model, 1.0, 1.0, poison)
    model.zero_grad_buffer()
    same("bytes at rest", model.ledger.bytes_by_category(), at_rest)
    for _ in range(2):
        run(model)
    model.finish_grad_sync()
    gradients = dict(model.named_parameters())
    local = gradients["module.blocks.1.weight"].grad.to_local()
    same("a clean gradient", local, torch.full_like(local, 2.0))
    model.zero_grad_buffer()
    model.set_model_auto_sync(True)  # the check runs inside `backward`, which ends the cycle
    with pytest.raises(NonFiniteGradientError) as again:
        run(model, poison=poison)
    assert again.value.microbatch == 0, again.value
    error = caught.value
    assert error.rank == dist.get_rank(), error
    assert error.parameters == ("blocks.1.weight", "blocks.1.alias"), error
    assert error.microbatch == 2, error
    return str(error)


def found_with(poison: float, **arguments: Any) -> str:
    """Text of what one finished microbatch raises, empty if it raises nothing."""
    model = chain("optim", **arguments)
    try:
        run(model, poison=poison)
        model.finish_grad_sync()
    except NonFiniteGradientError as error:
        model.zero_grad_buffer()
        assert not model._context.grads._flights
        assert model.ledger.bytes_by_category()["communication_buffers"] == 0
        return str(error)
    return ""


@pytest.mark.parametrize("values", [[1e38] * 8, [0.0], [-INF, 1.0], [NAN], [INF, -INF], []])
def test_finite_is_what_torch_calls_finite_even_where_the_sum_overflows(
    values: list[float],
) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    assert all_finite(tensor) == bool(torch.isfinite(tensor).all())


@pytest.mark.sample
@pytest.mark.on_ranks
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("poison", [NAN, -INF])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_report_names_rank_parameter_and_microbatch(
    strategy: str, poison: float, fused: bool
) -> None:
    text = third_microbatch(strategy, CHECKS[0], poison, fused)
    kinds = "1 NaN and 0 Inf" if math.isnan(poison) else "0 NaN and 1 Inf"
    wanted = f"rank {dist.get_rank()}: expected a finite gradient of blocks.1.weight = "
    assert wanted in text, text
    assert f"found {kinds} among 8 elements in microbatch 2 of the cycle" in text, text


@pytest.mark.sample
@pytest.mark.on_ranks
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_buffer_is_looked_at_before_it_is_reduced(strategy: str, fused: bool) -> None:
    text = third_microbatch(strategy, CHECKS[1], NAN, fused)
    whole = strategy in {"no_shard", "optim"}
    when = "in the sum of microbatches 0 to 2" if whole else "in microbatch 2"
    assert f"{when} of the cycle, before its reduction" in text, text


@pytest.mark.on_ranks
def test_an_overflow_of_the_communication_dtype_is_found() -> None:
    """A finite FP32 gradient that FP16 cannot hold."""
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, grad_comm_dtype=torch.float16)
    text = found_with(1e6, mixed_precision_policy=policy, check_for_nan_in_grad=True)
    assert "0 NaN and 1 Inf" in text, text
    assert found_with(1e6, mixed_precision_policy=policy, check_for_nan_in_grad=False) == ""


@pytest.mark.on_ranks
@pytest.mark.parametrize("check", CHECKS)
def test_finite_gradients_pass_every_check(check: str) -> None:
    assert found_with(1.0) == ""
    assert found_with(NAN) == ""  # off by default
    assert found_with(1.0, **{check: True}) == ""
    assert "1 NaN" in found_with(NAN, **{check: True})
