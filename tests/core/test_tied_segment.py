"""A weight that is tied into a unit whose activations are recomputed, on a mesh of replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, gather_full
from oracle.models import Block, loss
from oracle.ranks import RankPool, mesh_of_every_replica

pytestmark = pytest.mark.processes


class TiedSegment(nn.Module):
    """A unit under reentrant checkpointing shares its weight with the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = Block(width=8, hidden=8)
        self.last = nn.Linear(8, 8)
        self.block.up.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(checkpoint(self.block, x, use_reentrant=True))


def gradients_of_a_tied_segment(strategy: int) -> None:
    torch.manual_seed(3)
    plain = TiedSegment().double()
    torch.manual_seed(3)
    model: Any = fully_shard_model(
        TiedSegment().double(),
        device_mesh=mesh_of_every_replica(4)["dp"],
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )
    x = torch.ones(2, 8, dtype=torch.float64)
    loss(plain(x)).backward()
    loss(model(x)).backward()
    for name, wanted in plain.named_parameters():
        found = dict(model.named_parameters())[f"module.{name}"].grad
        torch.testing.assert_close(gather_full(found), wanted.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", range(4))
def test_a_tied_weight_may_get_gradients_from_nested_graphs_as_well(
    ranks: RankPool, strategy: int
) -> None:
    ranks.run(gradients_of_a_tied_segment, strategy)
