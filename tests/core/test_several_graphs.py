"""A unit that gets gradients from several graphs, under reentrant checkpoints, on two axes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model
from oracle.cycles import gathered, named
from oracle.models import Block, loss
from oracle.ranks import WORLD, on_two_axes
from oracle.reference import compare
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.on_ranks


class Branched(nn.Module):
    """A unit beside whose perceptron stands a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block(width=8, hidden=16)
        self.branch = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.branch(x).tanh()


class TwiceCheckpointed(nn.Module):
    """The unit shares the weight of its layer with the root, and runs twice in nested graphs.

    Or (is_tied=False) it shares nothing, and runs once in a nested graph and once beside it.
    """

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.is_tied = is_tied
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.unit = Branched()
        if is_tied:
            self.unit.branch.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.unit, x, use_reentrant=True)
        x = checkpoint(self.unit, x, use_reentrant=True) if self.is_tied else self.unit(x)
        return self.last(x)


@pytest.mark.sample
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("strategy", "outer_strategy"),
    [*((strategy, 0) for strategy in STRATEGIES), ("optim_grads_params", 1)],
)
def test_what_nested_graphs_add_is_reduced_over_the_outer_axis(
    strategy: str, outer_strategy: int, is_tied: bool
) -> None:
    torch.manual_seed(3)
    plain = TwiceCheckpointed(is_tied).double()
    model = fully_shard_model(
        copy.deepcopy(plain),
        fsdp_unit_modules=[Branched],
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
        sync_model_each_microbatch=False,
        **on_two_axes(outer_strategy),
    )
    batches = [
        torch.randn(4, 8, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        for rank in range(WORLD)
    ]
    for batch in batches:
        (loss(plain(batch)) / WORLD).backward()
    with model.sync():
        loss(model(batches[torch.distributed.get_rank()])).backward()
    model.finish_grad_sync()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    compare(gathered({name: p.grad for name, p in named(model)}), wanted)
