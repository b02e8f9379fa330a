"""Ways of clearing gradients, with one optimizer and with several: as under plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from mfsdp_core import fully_shard_optimizer
from mfsdp_core.errors import MfsdpError
from oracle.beside_torch import WAYS, beside, mean_over_ranks, own_batch, refusal
from oracle.models import Chain, loss
from oracle.ranks import RankPool

pytestmark = pytest.mark.processes

Optimizers = list[torch.optim.Optimizer]
Clear = Callable[[nn.Module, Optimizers], None]


def momentum(parameters: Iterable[Tensor]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def by_hand(module: nn.Module, _optimizers: Optimizers) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def to_zeros(_module: nn.Module, optimizers: Optimizers) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=False)


def one_after_its_step(_module: nn.Module, optimizers: Optimizers) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


def average(module: nn.Module) -> None:
    """Give every parameter of plain torch the mean over ranks."""
    for parameter in module.parameters():
        parameter.grad = mean_over_ranks(parameter)


def trained(way: tuple[str, str], clear: Clear, *, interleaved: bool) -> float:
    """Error of the weights after three cycles with two optimizers, and a step without a gradient.

    interleaved: every optimizer steps and clears before the next one steps.
    """
    pair = beside(Chain, way)
    inner: list[Chain] = [pair.plain, pair.model.module]  # type: ignore[list-item]
    both = [[momentum(one.blocks.parameters()), momentum(one.head.parameters())] for one in inner]
    both[1] = [fully_shard_optimizer(optimizer) for optimizer in both[1]]
    for seed in range(3):
        for module, optimizers in zip(pair.both, both, strict=True):
            loss(module(own_batch(seed))).backward()
            if module is pair.plain:
                average(module)
            groups = [[one] for one in optimizers] if interleaved else [optimizers]
            for group in groups:
                for optimizer in group:
                    optimizer.step()
                clear(module, group)
    for optimizer in (*both[0], *both[1]):
        optimizer.step()
    return pair.worst_weight()


def some_cleared(way: tuple[str, str]) -> tuple[str, float]:
    """Gradients of the blocks are set to None, those of the head go on."""
    pair = beside(Chain, way)

    def accumulate(module: nn.Module) -> None:
        for seed in range(2):
            loss(module(own_batch(seed))).backward()
            if not seed:
                inner = module if module is pair.plain else pair.model.module
                by_hand(inner.blocks, [])  # type: ignore[arg-type]

    accumulate(pair.plain)
    said = refusal(lambda: accumulate(pair.model), MfsdpError)
    return said, 0.0 if said else pair.worst_gradient()


def other_gradient(way: tuple[str, str]) -> list[str]:
    """What is said of a penalty computed beside the model, and of gradients put there by hand."""
    pair = beside(Chain, way)

    def penalised() -> None:
        shards = [p.to_local() for p in pair.model.parameters()]  # type: ignore[operator]
        penalty = sum(shard.square().sum() for shard in shards)
        (loss(pair.model(own_batch(0))) + penalty).backward()

    def replaced() -> None:
        for seed in range(2):
            with pair.model.sync():
                loss(pair.model(own_batch(seed))).backward()
            for parameter in pair.model.parameters():
                parameter.grad = parameter.grad * 2

    said = [refusal(penalised, MfsdpError)]
    pair.model.zero_grad()
    return [*said, refusal(replaced, MfsdpError)]


#: How to clear, and whether the first optimizer does so before the second one has stepped.
CLEARINGS = ((by_hand, False), (to_zeros, False), (to_zeros, True), (one_after_its_step, True))


@pytest.mark.parametrize("way", WAYS[:4], ids="-".join)
def test_gradients_are_cleared_as_under_plain_torch(ranks: RankPool, way: tuple[str, str]) -> None:
    for errors in ranks.run(trained_and_cleared, way):
        assert max(errors) < 1e-12, errors


def trained_and_cleared(way: tuple[str, str]) -> list[float]:
    return [trained(way, clear, interleaved=interleaved) for clear, interleaved in CLEARINGS]


@pytest.mark.parametrize("way", WAYS[:4], ids="-".join)
def test_gradients_that_are_cleared_in_part_are_right_or_refused(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    for said, error in ranks.run(some_cleared, way):
        assert error < 1e-12
        assert "already reduced in this cycle" in said or way[0].startswith("optim_grads")


@pytest.mark.parametrize("way", WAYS[:4], ids="-".join)
def test_a_gradient_from_elsewhere_is_never_lost(ranks: RankPool, way: tuple[str, str]) -> None:
    for penalised, replaced in ranks.run(other_gradient, way):
        assert "outside of the model's forward" in penalised
        assert "assigned by hand" in replaced or "already reduced" in replaced
