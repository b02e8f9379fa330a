"""A backward pass that raises, and what the next one finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bench.validate.fuzz.units import DeliberateError
from oracle.beside_torch import WAYS, Pair, beside, own_batch
from oracle.models import Block, loss

pytestmark = pytest.mark.on_ranks


def fail(model: nn.Module) -> None:
    """A pass whose last unit is reduced before the first one raises."""

    def refuse(_gradient: torch.Tensor) -> None:
        raise DeliberateError

    def watch(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        output.register_hook(refuse)

    first = next(m for m in model.modules() if isinstance(m, Block))
    hook = first.register_forward_hook(watch)
    with pytest.raises(DeliberateError):
        loss(model(own_batch(9).requires_grad_())).backward()
    hook.remove()


def by_optimizer(pair: Pair) -> None:
    for model in pair.both:
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()


def by_hand(pair: Pair) -> None:
    for model in pair.both:
        for parameter in model.parameters():
            parameter.grad = None


def to_zeros(pair: Pair) -> None:
    for model in pair.both:
        model.zero_grad(set_to_none=False)


@pytest.mark.sample
@pytest.mark.parametrize("clear", [by_optimizer, by_hand, to_zeros], ids=lambda one: one.__name__)
@pytest.mark.parametrize("way", WAYS, ids="/".join)
def test_gradients_of_a_first_pass_that_raises_go_with_the_cycle(
    way: tuple[str, str], clear: Callable[[Pair], Any]
) -> None:
    """Also where only parameters are cleared, which the model does not see."""
    pair = beside(lambda: nn.Sequential(*(Block(width=8, hidden=16) for _ in range(3))), way)
    for seed in range(2):
        for model in pair.both:
            fail(model)
        clear(pair)
        x = own_batch(seed)
        for model in pair.both:
            loss(model(x)).backward()
        pair.compare_gradients()
        clear(pair)
