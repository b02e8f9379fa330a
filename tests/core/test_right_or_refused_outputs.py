"""What units return, leave behind and are given: any class, any place, any number of times."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.judging import refuses
from mfsdp_core.errors import LifecycleError
from oracle.beside_torch import WAYS, beside, own_batch
from oracle.models import Block, Chain, loss

pytestmark = pytest.mark.on_ranks


class Prompted(nn.Module):
    """A leaf that is no parameter goes into every unit, in a container for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WithPrompt() for _ in range(3))

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        for position, block in enumerate(self.blocks):
            x = block(x, {"prompt": prompt} if position == 1 else prompt)
        return x


class WithPrompt(Block):
    def __init__(self) -> None:
        super().__init__(width=8, hidden=16)

    def forward(self, x: Tensor, prompt: Any) -> Tensor:  # type: ignore[override]
        value = prompt["prompt"] if isinstance(prompt, dict) else prompt
        return super().forward(x + value)


#: How a unit gives out a weight.
GIFTS = {
    "itself": lambda weight: weight,
    "view": lambda weight: weight.view_as(weight),
    "detached part": lambda weight: {"rows": [weight.detach()[:1]]},
}


class Giving(nn.Module):
    def __init__(self, gift: str) -> None:
        super().__init__()
        self.gift = gift
        self.inner = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32).view(4, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.inner(x) * self.weight.sum(), GIFTS[self.gift](self.weight)


class Given(nn.Module):
    """What its unit gives out it uses itself, and gives out a weight of its own."""

    def __init__(self, gift: str) -> None:
        super().__init__()
        self.giving = Giving(gift)
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, weight = self.giving(x)
        rows = weight["rows"][0] if isinstance(weight, dict) else weight
        return y * rows.sum(), self.scale.view_as(self.scale)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_unit_that_returns_its_weights_is_right_or_refused(way: tuple[str, str]) -> None:
    """With and without a graph."""
    for gift in GIFTS:
        pair = beside(lambda gift=gift: Given(gift), way, units=[Giving])
        if way[0] == "optim_grads_params":
            words = "Giving returned its own weights"
            with torch.no_grad():
                refuses(LifecycleError, words, pair.model, own_batch(1))
            refuses(LifecycleError, words, pair.model, own_batch(1))
            continue
        with torch.no_grad():
            pair.model(own_batch(1))
        for module in pair.both:
            y, scale = module(own_batch(1))
            loss(y * scale).backward()
        pair.compare_gradients()


def _is_of_a_pass(one: object) -> bool:
    """Tensors, and what the core notes of its calls."""
    # Of its type: some of torch's objects warn when they are asked for their class. Some types of
    # C have a descriptor in place of the module's name.
    return issubclass(type(one), Tensor) or str(type(one).__module__).startswith("mfsdp_core")


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_leaf_input_gathers_neither_hooks_nor_graphs(way: tuple[str, str]) -> None:
    """After passes with and without backward."""
    pair = beside(Prompted, way, units=[WithPrompt])
    prompts = [torch.ones(8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for module, prompt in zip(pair.both, prompts, strict=True):
        loss(module(own_batch(0), prompt)).backward()
    pair.compare_gradients()
    plain, found = (prompt.grad for prompt in prompts)
    assert plain is not None
    assert found is not None
    assert float((found - plain).norm()) < 1e-12
    pair.zero_grad()
    counts = []
    for step in range(12):
        value = pair.model(own_batch(step), prompts[1])
        if step % 2:
            loss(value).backward()
            pair.model.zero_grad()
        del value
        if step in (5, 11):
            gc.collect()
            hooks = len(prompts[1]._backward_hooks or ())
            counts.append((hooks, sum(_is_of_a_pass(one) for one in gc.get_objects())))
    (hooks, before), (hooks_later, later) = counts
    assert hooks == hooks_later
    assert later <= before, counts  # less where what other tests left has gone


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_backward_pass_on_another_thread_is_that_of_plain_torch(way: tuple[str, str]) -> None:
    pair = beside(Chain, way)
    for module in pair.both:
        thread = threading.Thread(target=loss(module(own_batch(1))).backward)
        thread.start()
        thread.join()
    pair.compare_gradients()


def test_recording_a_sharded_forward_pass_is_refused_and_training_goes_on() -> None:
    pair = beside(Chain, WAYS[-1])
    batch = (own_batch(1),)
    words = "expected a module that is not sharded"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit
        refuses(LifecycleError, words, torch.jit.trace, pair.model, batch)
        refuses(LifecycleError, words, torch.export.export, pair.model.module, batch)
    pair.backward(own_batch(1))
    pair.compare_gradients()
