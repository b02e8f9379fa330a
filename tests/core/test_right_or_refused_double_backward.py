"""Gradients of gradients, gradients of inputs, and passes that leave parameters alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracle.beside_torch import WAYS, beside, distance, own_batch
from oracle.models import Chain
from oracle.ranks import RankPool

pytestmark = pytest.mark.processes


class Forces(Chain):
    """An energy and, as in force fields, its gradient, taken inside of `forward`."""

    def __init__(self) -> None:
        super().__init__(outputs=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = x.detach().requires_grad_()
        energy = super().forward(x).square().sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return energy, forces


def penalty_alone(way: tuple[str, str]) -> list[float]:
    """The same without another loss, from an input that is no leaf and one unit frozen."""

    def factory() -> nn.Module:
        chain = Chain()
        chain.blocks[1].requires_grad_(False)
        return chain

    pair = beside(factory, way)
    for module in pair.both:
        x = own_batch(5).requires_grad_() * 1.0
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    return [pair.worst_gradient()]


def third_order(way: tuple[str, str]) -> list[float]:
    """The gradient of a Hessian-vector product, and of a Jacobian-vector product by two passes."""
    pair = beside(Chain, way)
    for module in pair.both:
        x = own_batch(6).requires_grad_()
        (first,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        second.square().sum().backward()
    errors = [pair.worst_gradient()]
    pair.zero_grad()
    for module in pair.both:
        x = own_batch(6).requires_grad_()
        y = module(x)
        dummy = torch.zeros_like(y, requires_grad=True)
        (transposed,) = torch.autograd.grad(y, x, dummy, create_graph=True)
        (along,) = torch.autograd.grad(transposed, dummy, own_batch(7), create_graph=True)
        along.square().sum().backward()
    return [*errors, pair.worst_gradient()]


def forces_inside_forward(way: tuple[str, str]) -> list[float]:
    """Trained on energies and forces; then forces alone, in evaluation."""
    pair = beside(Forces, way)
    for module in pair.both:
        energy, forces = module(own_batch(8))
        (energy + (forces - 1).square().sum()).backward()
    errors = [pair.worst_gradient()]
    pair.zero_grad()
    found = [module.eval()(own_batch(9))[1] for module in pair.both]
    errors.append(distance(found[1], found[0]))
    for module in pair.both:
        energy, _ = module.train()(own_batch(8))
        energy.backward()
    return [*errors, pair.worst_gradient()]


def batched_gradients(way: tuple[str, str]) -> list[float]:
    """A Jacobian in one vectorised backward pass."""
    pair = beside(Chain, way)
    x = own_batch(4, 2, 8).requires_grad_()
    found = [torch.autograd.functional.jacobian(module, x, vectorize=True) for module in pair.both]
    return [distance(found[1], found[0])]


CASES: dict[str, Any] = {
    case.__name__: case
    for case in (
        penalty_alone,
        third_order,
        forces_inside_forward,
        batched_gradients,
    )
}


@pytest.mark.sample
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_gradients_of_gradients_are_those_of_plain_torch(
    ranks: RankPool, way: tuple[str, str], case: str
) -> None:
    for errors in ranks.run(CASES[case], way):
        assert max(errors) < 1e-10, errors
