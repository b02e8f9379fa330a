"""Weights that the user changes, exchanges or steps when torch would let them, or would not."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mfsdp_core import MixedPrecisionPolicy, fully_shard_optimizer
from mfsdp_core.errors import LifecycleError
from oracle.beside_torch import (
    WAYS,
    beside,
    distance,
    own_batch,
    refusal,
)
from oracle.models import Chain, loss
from oracle.ranks import RankPool

pytestmark = pytest.mark.processes


def multiplied_by_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.5)


def stale_graphs(way: tuple[str, str]) -> list[str]:
    """What backward() says through a graph of before a step, a load, and a change in place."""
    pair = beside(Chain, way)
    model = pair.model
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    messages = []
    for change in (optimizer.step, lambda: multiplied_by_data(model), lambda: _reload(model)):
        old = loss(model(own_batch(0)))
        loss(model(own_batch(1))).backward()
        change()
        optimizer.zero_grad()
        messages.append(refusal(old.backward, LifecycleError))
        # What was refused is forgotten.
        loss(model(own_batch(2))).backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.zero_grad()
    return messages


def _reload(model: Any) -> None:
    model.load_state_dict({key: value * 2 for key, value in model.state_dict().items()})


def graphs_that_stay_good(way: tuple[str, str]) -> float:
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
    return pair.worst_gradient()


def assigned(way: tuple[str, str]) -> list[str]:
    """What is said about parameters that were put in the place of sharded ones."""
    messages = []
    for change in (_assign, _remove, _assign_state):
        pair = beside(Chain, way)
        change(pair.model.module)
        messages.append(refusal(lambda p=pair: p.model(own_batch(0)), LifecycleError))
    pair = beside(Chain, way)
    values = {name: p.detach() * 2 for name, p in pair.model.named_parameters()}
    call = torch.func.functional_call
    messages.append(refusal(lambda: call(pair.model, values, (own_batch(0),)), LifecycleError))
    inner = dict(pair.model.module.blocks[1].named_parameters())
    doubled = {name: p.detach() * 2 for name, p in inner.items()}
    block = pair.model.module.blocks[1]
    messages.append(refusal(lambda: call(block, doubled, (own_batch(0),)), LifecycleError))
    # The model's own parameters are no exchange, and what was refused is forgotten.
    plain = dict(pair.plain.named_parameters())
    own = dict(pair.model.named_parameters())
    outputs = [
        call(pair.plain, plain, (own_batch(1),)),
        call(pair.model, own, (own_batch(1),)),
    ]
    assert distance(outputs[1], outputs[0]) < 1e-12
    return messages


def _assign(module: Any) -> None:
    module.blocks[1].up.weight = nn.Parameter(torch.zeros(16, 8, dtype=torch.float64))


def _remove(module: Any) -> None:
    module.head.bias = None


def _assign_state(module: Any) -> None:
    state = {key: value.clone() for key, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def registration_hooks() -> tuple[int, int]:
    """How many there are while one model lives, and once others have come and gone."""
    hooks = torch.nn.modules.module._global_module_registration_hooks
    counts = []
    for _ in range(2):
        model = beside(Chain, WAYS[3]).model
        counts.append(len(hooks))
        del model
        gc.collect()
    return counts[0], counts[1]


def complex_weights(policy: str) -> Any:
    """With the default policy the refusal; with dtypes left alone the gradient error."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(x.to(self.phase.dtype) @ self.phase).sum(-1)

    if policy == "default":
        build = lambda: beside(  # noqa: E731
            Complex,
            WAYS[0],
            units=[],
            dtype=None,
            mixed_precision_policy=MixedPrecisionPolicy(),
        )
        return refusal(build, ValueError)
    worst = 0.0
    for way in WAYS:
        pair = beside(
            Complex,
            way,
            units=[],
            dtype=None,
            mixed_precision_policy=MixedPrecisionPolicy(None, None, None),
        )
        for module in pair.both:
            loss(module(own_batch(1).float())).backward()
        worst = max(worst, pair.worst_gradient())
    return worst


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_graph_of_before_a_change_of_weights_is_refused(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    for messages in ranks.run(stale_graphs, way):
        for message in messages:
            assert "weights have changed since the forward pass" in message


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_graph_whose_weights_have_not_changed_is_good(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    assert max(ranks.run(graphs_that_stay_good, way)) < 1e-12


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_parameters_assigned_after_sharding_are_refused(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    for messages in ranks.run(assigned, way):
        assert all("expected the sharded parameter" in message for message in messages), messages


def test_models_that_come_and_go_leave_one_watch_on_registrations(ranks: RankPool) -> None:
    assert all(first == second for first, second in ranks.run(registration_hooks))


def test_complex_weights_keep_their_imaginary_part_or_are_refused(ranks: RankPool) -> None:
    for said in ranks.run(complex_weights, "default"):
        assert "complex" in said
        assert "main_params_dtype=None" in said
    assert max(ranks.run(complex_weights, "their own")) < 1e-5
