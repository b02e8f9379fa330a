"""Weights that begin unequal, and that users change, exchange or step when torch would not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.judging import refuses
from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_core.errors import LifecycleError
from oracle.beside_torch import WAYS, beside, near, own_batch
from oracle.models import Block, Chain, loss
from oracle.ranks import mesh, on_two_axes

pytestmark = pytest.mark.on_ranks


def multiplied_by_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.5)


def reload(model: Any) -> None:
    model.load_state_dict({key: value * 2 for key, value in model.state_dict().items()})


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_graph_of_before_a_change_of_weights_is_refused(way: tuple[str, str]) -> None:
    """Through a step, a load, and a change in place."""
    model = beside(Chain, way).model
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for change in (optimizer.step, lambda: multiplied_by_data(model), lambda: reload(model)):
        old = loss(model(own_batch(0)))
        loss(model(own_batch(1))).backward()
        change()
        optimizer.zero_grad()
        refuses(LifecycleError, "weights have changed since the forward pass", old.backward)
        # What was refused is forgotten.
        loss(model(own_batch(2))).backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_graph_whose_weights_have_not_changed_is_good(way: tuple[str, str]) -> None:
    """A step between the passes of a model and an old graph of another one; no step, two graphs."""
    pair, other = beside(Chain, way), beside(Chain, way)
    kept = [loss(module(own_batch(0))) for module in pair.both]
    optimizer = fully_shard_optimizer(torch.optim.SGD(other.model.parameters(), lr=0.1))
    loss(other.model(own_batch(1))).backward()
    optimizer.step()
    for module in pair.both:
        module(own_batch(5))  # a pass in between, for nothing
    for value in kept:
        value.backward()
    pair.compare_gradients()


def assign(module: Any) -> None:
    module.blocks[1].up.weight = nn.Parameter(torch.zeros(16, 8, dtype=torch.float64))


def remove(module: Any) -> None:
    module.head.bias = None


def assign_state(module: Any) -> None:
    state = {key: value.clone() for key, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_parameters_assigned_after_sharding_are_refused(way: tuple[str, str]) -> None:
    words, call = "expected the sharded parameter", torch.func.functional_call
    for change in (assign, remove, assign_state):
        model = beside(Chain, way).model
        change(model.module)
        refuses(LifecycleError, words, model, own_batch(0))
    pair = beside(Chain, way)
    block = pair.model.module.blocks[1]
    for module in (pair.model, block):
        doubled = {name: p.detach() * 2 for name, p in module.named_parameters()}
        refuses(LifecycleError, words, call, module, doubled, (own_batch(0),))
    # The model's own parameters are no exchange, and what was refused is forgotten.
    wanted, found = (call(m, dict(m.named_parameters()), (own_batch(1),)) for m in pair.both)
    near("output", found, wanted)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(self.phase.dtype) @ self.phase).sum(-1)


def test_complex_weights_keep_their_imaginary_part_or_are_refused() -> None:
    options: dict[str, Any] = {"units": [], "dtype": None}
    with pytest.raises(ValueError, match=r"complex.*main_params_dtype=None"):
        beside(Complex, WAYS[0], mixed_precision_policy=MixedPrecisionPolicy(), **options)
    as_they_are = MixedPrecisionPolicy(None, None, None)
    for way in WAYS:
        pair = beside(Complex, way, mixed_precision_policy=as_they_are, **options)
        for module in pair.both:
            loss(module(own_batch(1).float())).backward()
        pair.compare_gradients(1e-5)


def said(change: Any, **arguments: Any) -> list[str]:
    """Warnings of sharding a model that `change` has changed."""
    torch.manual_seed(3)
    module = Chain()
    with torch.no_grad():
        change(module)
    arguments.setdefault("device_mesh", mesh(2)["dp"] if "dp_outer_dim" not in arguments else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard_model(module, **{"fsdp_unit_modules": [Block], **arguments})
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_unequal_weights_are_said_on_every_rank(strategy: str) -> None:
    """Where one element of one weight differs on the second rank."""
    second = mesh(2).get_local_rank("dp") == 1

    def change(module: nn.Module) -> None:
        module.get_parameter("head.bias")[3] += 1e-6 * second

    assert said(lambda _: None, zero_dp_strategy=strategy) == []
    (warning,) = said(change, zero_dp_strategy=strategy)
    assert "1 of 17 parameters have other values on other ranks" in warning
    assert "the first is head.bias" in warning


def test_unequal_weights_are_said_along_the_outer_axis() -> None:
    where = on_two_axes()
    outer = where["device_mesh"].get_local_rank("outer")
    (warning,) = said(lambda module: module.get_parameter("head.bias").add_(outer), **where)
    assert "the first is head.bias" in warning


def test_an_empty_list_of_units_is_said() -> None:
    (warning,) = said(lambda _: None, fsdp_unit_modules=[])
    assert "fsdp_unit_modules is empty" in warning
    assert said(lambda _: None, fsdp_unit_modules=None) == []
