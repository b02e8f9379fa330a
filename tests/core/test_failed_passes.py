"""A backward pass that raises, and what the next one finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from bench.testing.units import DeliberateError
from mfsdp_core import (
    MixedPrecisionPolicy,
    export_state_dict,
    fully_shard_model,
    fully_shard_optimizer,
    gather_full,
)
from mfsdp_core.errors import LifecycleError
from oracle.beside_torch import WAYS, Pair, beside, own_batch
from oracle.models import Block, loss
from oracle.ranks import mesh
from oracle.reference import compare

pytestmark = pytest.mark.on_ranks


def blocks() -> nn.Module:
    return nn.Sequential(*(Block(width=8, hidden=16) for _ in range(3)))


def fail(model: nn.Module, dtype: torch.dtype = torch.float64) -> None:
    """A pass whose last unit is reduced before the first one raises."""

    def refuse(_gradient: torch.Tensor) -> None:
        raise DeliberateError

    def watch(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        output.register_hook(refuse)

    first = next(m for m in model.modules() if isinstance(m, Block))
    hook = first.register_forward_hook(watch)
    with pytest.raises(DeliberateError):
        loss(model(own_batch(9).to(dtype).requires_grad_())).backward()
    hook.remove()


def fail_forward(called: nn.Module) -> None:
    """A module inside of the wrapper is called by itself, as `generate()` does it, and raises."""

    def refuse(*_call: Any) -> None:
        raise DeliberateError

    last = [m for m in called.modules() if isinstance(m, nn.Linear)][-1]
    hook = last.register_forward_hook(refuse)
    with pytest.raises(DeliberateError):
        called(own_batch(9).bfloat16())
    hook.remove()


#: Passes of a BF16 model that raise.
FAILS: dict[str, Callable[[Any], None]] = {
    "backward": lambda model: fail(model, torch.bfloat16),
    "forward": lambda model: fail_forward(model.module),
    "unit": lambda model: fail_forward(model.module[1]),
}


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


READS: dict[str, Callable[[Any], Mapping[str, torch.Tensor]]] = {
    "state_dict": lambda model: model.state_dict(),
    "of the module": lambda model: model.module.state_dict(),
    "of units": lambda model: {
        f"{name}.{key}": value
        for name, unit in model.module.named_children()
        for key, value in unit.state_dict().items()
    },
    "parameters": lambda model: dict(model.named_parameters()),
    "exported": export_state_dict,
}


@pytest.mark.parametrize("how", FAILS)
@pytest.mark.parametrize("read", READS)
def test_weights_that_are_read_after_a_pass_that_raises_are_the_main_ones(
    read: str, how: str
) -> None:
    """Not those that units compute with, which have another dtype."""
    model = fully_shard_model(
        blocks().bfloat16(),
        device_mesh=mesh(2)["dp"],
        zero_dp_strategy=3,
        fsdp_unit_modules=[Block],
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2**-12)
    wanted = {name: gather_full(value) for name, value in READS[read](model).items()}
    FAILS[how](model)
    found = {name: gather_full(value) for name, value in READS[read](model).items()}
    assert found.keys() == wanted.keys()
    if wanted:  # exported, they are on the first rank alone
        compare(found, wanted)


def test_a_forward_pass_may_ask_for_weights_while_it_runs() -> None:
    pair = beside(blocks, WAYS[3])
    layer = pair.model.module[1].up
    asked = layer.register_forward_hook(lambda *_: pair.model.state_dict() and None)
    pair.model.module[1](own_batch(0))
    pair.backward(own_batch(1))
    asked.remove()
    pair.compare_gradients()


@pytest.mark.sample
@pytest.mark.parametrize("clear", [by_optimizer, by_hand, to_zeros], ids=lambda one: one.__name__)
@pytest.mark.parametrize("way", WAYS, ids="/".join)
def test_gradients_of_a_first_pass_that_raises_go_with_the_cycle(
    way: tuple[str, str], clear: Callable[[Pair], Any]
) -> None:
    """Also where only parameters are cleared, which the model does not see."""
    pair = beside(blocks, way)
    for seed in range(2):
        for model in pair.both:
            fail(model)
        clear(pair)
        x = own_batch(seed)
        for model in pair.both:
            loss(model(x)).backward()
        pair.compare_gradients()
        clear(pair)


@pytest.mark.sample
@pytest.mark.parametrize("clear", [by_optimizer, by_hand], ids=lambda one: one.__name__)
@pytest.mark.parametrize("way", WAYS, ids="/".join)
def test_after_a_later_pass_that_raises_only_the_model_can_begin_a_cycle(
    way: tuple[str, str], clear: Callable[[Pair], Any]
) -> None:
    """No parameter shows yet what earlier passes gave, so clearing parameters does not clear it."""
    pair = beside(blocks, way)
    with pair.model.no_sync():
        loss(pair.model(own_batch(0))).backward()
        fail(pair.model)
    # Some units would have what the pass that raised gave, and others not.
    optimizer = fully_shard_optimizer(torch.optim.SGD(pair.model.parameters(), lr=0.1))
    with pytest.raises(LifecycleError, match=r"Expected model.zero_grad\(\)"):
        optimizer.step()
    clear(pair)
    for _ in range(2):
        with pytest.raises(LifecycleError, match=r"Expected model.zero_grad\(\)"):
            loss(pair.model(own_batch(1))).backward()
    pair.zero_grad()
    pair.backward(own_batch(1))
    pair.compare_gradients()
