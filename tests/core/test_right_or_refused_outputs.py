"""What units return, leave behind and are given: any class, any place, any number of times."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mfsdp_core.errors import LifecycleError
from oracle.beside_torch import WAYS, beside, own_batch, refusal
from oracle.models import Block, Chain, loss
from oracle.ranks import RankPool

pytestmark = pytest.mark.processes


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


def given_weights(way: tuple[str, str], gift: str) -> tuple[float, list[str]]:
    """Gradient error, with what is said of the first two calls, one without a graph."""
    pair = beside(lambda: Given(gift), way, units=[Giving])
    with torch.no_grad():
        said = [refusal(lambda: pair.model(own_batch(1)), LifecycleError)]
    said.append(refusal(lambda: pair.model(own_batch(1)), LifecycleError))
    if any(said):
        return 0.0, said
    for module in pair.both:
        y, scale = module(own_batch(1))
        loss(y * scale).backward()
    return pair.worst_gradient(), said


def _is_of_a_pass(one: object) -> bool:
    """Tensors, and what the core notes of its calls."""
    return isinstance(one, torch.Tensor) or type(one).__module__.startswith("mfsdp_core")


def leaf_inputs(way: tuple[str, str]) -> list[float]:
    """Error, and objects that a pass has left alive, after passes with and without backward."""
    pair = beside(Prompted, way, units=[WithPrompt])
    prompts = [torch.ones(8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for module, prompt in zip(pair.both, prompts, strict=True):
        loss(module(own_batch(0), prompt)).backward()
    assert prompts[0].grad is not None
    errors = [pair.worst_gradient(), float((prompts[0].grad - prompts[1].grad).norm())]
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
            counts.append(len(prompts[1]._backward_hooks or ()))
            counts.append(sum(_is_of_a_pass(one) for one in gc.get_objects()))
    return [*errors, counts[2] - counts[0], counts[3] - counts[1]]


def other_threads(way: tuple[str, str]) -> float:
    """A backward pass on another thread than the forward pass."""
    pair = beside(Chain, way)
    for module in pair.both:
        thread = threading.Thread(target=loss(module(own_batch(1))).backward)
        thread.start()
        thread.join()
    return pair.worst_gradient()


def recorded(way: tuple[str, str]) -> tuple[list[str], float]:
    """Refusals of what records a forward pass, then the gradients of a step after them."""
    pair = beside(Chain, way)
    batch = (own_batch(1),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit
        said = [
            refusal(lambda: torch.jit.trace(pair.model, batch), LifecycleError),
            refusal(lambda: torch.export.export(pair.model.module, batch), LifecycleError),
        ]
    for module in pair.both:
        loss(module(own_batch(1))).backward()
    return said, pair.worst_gradient()


def test_recording_a_sharded_forward_pass_is_refused_and_training_goes_on(ranks: RankPool) -> None:
    for said, error in ranks.run(recorded, WAYS[-1]):
        assert all("expected a module that is not sharded" in words for words in said), said
        assert error < 1e-12


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_unit_that_returns_its_weights_is_right_or_refused(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    for gift in GIFTS:
        for error, said in ranks.run(given_weights, way, gift):
            if way[0] == "optim_grads_params":
                assert all("Giving returned its own weights" in words for words in said), gift
            else:
                assert (said, error < 1e-12) == (["", ""], True), gift


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_leaf_input_gathers_neither_hooks_nor_graphs(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    for error, of_leaf, hooks, objects in ranks.run(leaf_inputs, way):
        assert error < 1e-12
        assert of_leaf < 1e-12
        assert (hooks, objects) == (0, 0)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_backward_pass_on_another_thread_is_that_of_plain_torch(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    assert max(ranks.run(other_threads, way)) < 1e-12
