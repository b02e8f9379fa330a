"""Graphs of gradients, and functions of `torch.func`: refused in words, and training goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from mfsdp_core.errors import LifecycleError
from oracle.beside_torch import WAYS, beside, near, own_batch
from oracle.models import Chain, loss

pytestmark = [pytest.mark.on_ranks, pytest.mark.parametrize("way", WAYS, ids="-".join)]
GRAPH, TRANSFORM = "create_graph=True", "torch.func"


class Forces(nn.Module):
    """An energy whose gradient, as in force fields, is taken inside of `forward`."""

    def __init__(self, chain: nn.Module) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.chain(x).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def penalty(model: Any) -> Tensor:
    x = own_batch(5).requires_grad_() * 1.0
    return torch.autograd.grad(loss(model(x)), x, create_graph=True)[0]


def products(model: Any) -> Any:
    """Of the Jacobian, one for each of several vectors, through one graph."""
    x = own_batch(0).requires_grad_()
    y = model(x)
    return torch.func.vmap(lambda v: torch.autograd.grad(y, x, v))(torch.stack([y, y]).detach())


def along(model: Any) -> Tensor:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(own_batch(0), torch.ones_like(own_batch(0)))
        return model(x)


USES: tuple[tuple[str, Callable[[Any], object]], ...] = (
    (GRAPH, penalty),
    (GRAPH, lambda m: loss(m(own_batch(1))).backward(create_graph=True)),
    (GRAPH, lambda m: Forces(m)(own_batch(2))),
    ("inside of a function of torch.func", products),
    (TRANSFORM, lambda m: torch.func.grad(lambda v: loss(m(v)))(own_batch(0))),
    (TRANSFORM, lambda m: torch.func.vjp(m, own_batch(0))),
    (TRANSFORM, lambda m: torch.func.jvp(m, (own_batch(0),), (own_batch(1),))),
    (TRANSFORM, lambda m: torch.func.vmap(m)(own_batch(0))),
    (TRANSFORM, along),
)


@pytest.mark.sample
def test_graphs_of_gradients_and_transforms_are_refused_and_training_goes_on(
    way: tuple[str, str],
) -> None:
    pair = beside(Chain, way)
    for words, use in USES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of forward mode and of create_graph
            with pytest.raises(LifecycleError, match=words):
                use(pair.model)
        pair.zero_grad()
        pair.backward(own_batch(3))
        pair.compare_gradients()
        pair.zero_grad()


@pytest.mark.sample
def test_a_jacobian_in_one_vectorised_backward_pass(way: tuple[str, str]) -> None:
    x = own_batch(4, 2, 8).requires_grad_()
    wanted, found = (
        torch.autograd.functional.jacobian(module, x, vectorize=True)
        for module in beside(Chain, way).both
    )
    near("Jacobian", found, wanted, 1e-10)
