"""Low-rank adapters as peft builds them: generation past the root, a reference model, stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mfsdp_core
from mfsdp_core.errors import LifecycleError
from oracle.beside_torch import Pair, beside, near
from oracle.ranks import mesh

pytestmark = pytest.mark.on_ranks


class Adapted(nn.Module):
    """A frozen projection with an adapter that can be turned off."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.is_off = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y if self.is_off else y + self.up(self.down(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query = nn.LayerNorm(8), Adapted()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.query(self.norm(x))


class Model(nn.Module):
    """A language model whose embedding and head are frozen, and the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8).requires_grad_(False)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        if len(tokens) > 5:
            raise ValueError("a batch too large")
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens: Tensor) -> Tensor:
        for _ in range(3):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


class Wrapped(nn.Module):
    """Calls the model in it, as a PeftModel: its own `generate` does not call itself."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = Model()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.base_model(tokens)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        adapted = [one for one in self.modules() if isinstance(one, Adapted)]
        for is_off in (True, False):
            for one in adapted:
                one.is_off = is_off
                one.down.requires_grad_(not is_off)
                one.up.requires_grad_(not is_off)
            if is_off:
                yield


def pair(strategy: str) -> Pair:
    return beside(Wrapped, (strategy, "storage_resize"), units=[Layer])


def tokens(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(2 * number + mesh(2).get_local_rank("dp"))
    return torch.randint(0, 11, (2, 5), generator=generator)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_an_adapter_generates_past_the_root_and_has_a_reference_model(strategy: str) -> None:
    both = pair(strategy)
    inner: Any = both.model.module.base_model
    optimizers = [
        torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
        for one in both.both
    ]
    mfsdp_core.fully_shard_optimizer(optimizers[1])
    for step in range(3):
        mine = tokens(step)
        assert torch.equal(inner.generate(mine), both.plain.base_model.generate(mine))
        if step == 1:
            with torch.no_grad(), pytest.raises(ValueError, match="too large"):
                inner(torch.zeros(6, 2, dtype=torch.int64))
        with torch.no_grad(), both.model.module.disable_adapter(), both.plain.disable_adapter():
            near("reference", both.model(mine), both.plain(mine), 1e-12)
        for one in both.both:
            one(mine).square().mean().backward()
        both.average()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    both.compare_weights()


def test_freezing_with_gradients_is_refused_and_stages_have_optimizers_of_their_own() -> None:
    both = pair("optim_grads_params")
    with (
        both.model.module.disable_adapter(),
        pytest.raises(LifecycleError, match="give each stage an optimizer over its own"),
    ):
        both.model(tokens(0))
    for stage in ("down", "up"):
        optimizers = [
            torch.optim.SGD([p for n, p in one.named_parameters() if f".{stage}." in n], lr=0.1)
            for one in both.both
        ]
        mfsdp_core.fully_shard_optimizer(optimizers[1])
        for step in range(2):
            for one in both.both:
                one(tokens(step)).square().mean().backward()
            both.average()
            for optimizer, one in zip(optimizers, both.both, strict=True):
                optimizer.step()
                one.zero_grad()
    both.compare_weights()
