"""Gradients of gradients, gradients of inputs, and passes that leave parameters alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from oracle.beside_torch import WAYS, beside, near, own_batch
from oracle.models import Chain

pytestmark = [pytest.mark.on_ranks, pytest.mark.parametrize("way", WAYS, ids="-".join)]
CLOSE = 1e-10


class Forces(Chain):
    """An energy and, as in force fields, its gradient, taken inside of `forward`."""

    def __init__(self) -> None:
        super().__init__(outputs=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = x.detach().requires_grad_()
        energy = super().forward(x).square().sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return energy, forces


@pytest.mark.sample
def test_a_penalty_alone_from_no_leaf_and_with_a_frozen_unit(way: tuple[str, str]) -> None:
    def factory() -> nn.Module:
        chain = Chain()
        chain.blocks[1].requires_grad_(False)
        return chain

    pair = beside(factory, way)
    for module in pair.both:
        x = own_batch(5).requires_grad_() * 1.0
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    pair.compare_gradients(CLOSE)


@pytest.mark.sample
def test_hessian_vector_and_jacobian_vector_products_by_two_passes(way: tuple[str, str]) -> None:
    pair = beside(Chain, way)
    for module in pair.both:
        x = own_batch(6).requires_grad_()
        (first,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        second.square().sum().backward()
    pair.compare_gradients(CLOSE)
    pair.zero_grad()
    for module in pair.both:
        x = own_batch(6).requires_grad_()
        y = module(x)
        dummy = torch.zeros_like(y, requires_grad=True)
        (transposed,) = torch.autograd.grad(y, x, dummy, create_graph=True)
        (along,) = torch.autograd.grad(transposed, dummy, own_batch(7), create_graph=True)
        along.square().sum().backward()
    pair.compare_gradients(CLOSE)


@pytest.mark.sample
def test_energies_and_forces_then_forces_alone_in_evaluation(way: tuple[str, str]) -> None:
    pair = beside(Forces, way)
    for module in pair.both:
        energy, forces = module(own_batch(8))
        (energy + (forces - 1).square().sum()).backward()
    pair.compare_gradients(CLOSE)
    pair.zero_grad()
    wanted, found = (module.eval()(own_batch(9))[1] for module in pair.both)
    near("forces", found, wanted, CLOSE)
    for module in pair.both:
        energy, _ = module.train()(own_batch(8))
        energy.backward()
    pair.compare_gradients(CLOSE)


@pytest.mark.sample
def test_a_jacobian_in_one_vectorised_backward_pass(way: tuple[str, str]) -> None:
    x = own_batch(4, 2, 8).requires_grad_()
    wanted, found = (
        torch.autograd.functional.jacobian(module, x, vectorize=True)
        for module in beside(Chain, way).both
    )
    near("Jacobian", found, wanted, CLOSE)
