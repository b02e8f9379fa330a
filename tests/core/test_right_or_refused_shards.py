"""Shards beside the model: whole tensors made of them, and parameters without elements."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import LifecycleError
from oracle.beside_torch import WAYS, beside, own_batch, refusal
from oracle.models import Block, loss
from oracle.ranks import RankPool

pytestmark = pytest.mark.processes


class Uneven(nn.Module):
    """Whose parameters' rows lie on one rank, or not in halves; some have no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 11)
        self.block = Block(width=11, hidden=5)
        self.scale = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(self.first(x)) * self.scale.sum() + self.empty.sum()
        return y


def whole(way: tuple[str, str]) -> tuple[float, bool, str]:
    """Gradient error, whether `full_tensor` is the weight, and what is said of its gradient."""
    pair = beside(Uneven, way)
    for module in pair.both:
        loss(module(own_batch(0))).backward()
    error = pair.worst_gradient()
    wanted = dict(pair.plain.named_parameters())
    equal = []
    for name, found in pair.model.named_parameters():
        value = found.full_tensor() if isinstance(found, DTensor) else found
        equal.append(torch.equal(value.detach(), wanted[name.removeprefix("module.")].detach()))
    pair.model.zero_grad()

    def penalised() -> None:
        penalty = pair.model.module.scale.full_tensor().norm()
        (loss(pair.model(own_batch(0))) + penalty).backward()

    return error, all(equal), refusal(penalised, LifecycleError)


@pytest.mark.parametrize("way", WAYS[:4], ids="-".join)
def test_whole_weights_are_right_and_give_no_gradient_silently(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    for error, is_equal, said in ranks.run(whole, way):
        assert error < 1e-12
        assert is_equal
        assert "from the model's forward alone" in said
