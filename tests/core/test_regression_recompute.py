"""R7: recomputing activations gathers no unit ahead, and leaves none behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, gather_full
from mfsdp_core.events import Event
from oracle.models import Block, loss
from oracle.ranks import RankPool, mesh, mesh_of_every_replica

pytestmark = pytest.mark.processes


class Segments(nn.Module):
    """Four units, recomputed in segments of `length` units."""

    def __init__(self, length: int, reentrant: bool) -> None:
        super().__init__()
        self.length, self.reentrant = length, reentrant
        self.blocks = nn.ModuleList(Block(width=8, hidden=16) for _ in range(4))
        self.last = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for first in range(0, 4, self.length):
            blocks = self.blocks[first : first + self.length]
            x = checkpoint(nn.Sequential(*blocks), x, use_reentrant=self.reentrant)
        return self.last(x)


def gathers_of_a_step(length: int, reentrant: bool) -> tuple[int, set[str]]:
    """Gathers of two microbatches, and the units that are left behind."""
    model: Any = fully_shard_model(
        Segments(length, reentrant).double(),
        device_mesh=mesh(2)["dp"],
        fsdp_unit_modules=[Block],
        sync_model_each_microbatch=False,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )
    gathers, held = 0, set()

    def follow(event: Event) -> None:
        nonlocal gathers
        gathers += event.kind == "collective" and event.operation == "all_gather"
        if event.kind == "materialise":
            held.add(event.bucket)
        elif event.kind == "release":
            held.discard(event.bucket)

    model.events.subscribe(follow)
    for _ in range(2):
        x = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)
        loss(model(x)).backward()
    model.finish_grad_sync()
    return gathers, held


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("length", [1, 2])
def test_r7_recomputation_gathers_each_unit_once_more_and_leaves_none(
    ranks: RankPool, length: int, reentrant: bool
) -> None:
    for gathers, held in ranks.run(gathers_of_a_step, length, reentrant):
        # Per microbatch 4 units forward and 4 backward; the root is there already.
        assert gathers == 2 * 8
        assert held == set()


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
