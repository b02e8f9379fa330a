"""A unit that runs twice on one rank and once on another, and other ways past the hooks."""

from __future__ import annotations

from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model
from mfsdp_core.comm import point_to_point
from mfsdp_core.errors import LifecycleError
from oracle.beside_torch import near, own_batch
from oracle.models import Block
from oracle.ranks import WORLD
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.on_ranks


class Repeating(nn.Module):
    """Three units of one size, of which the first may run again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width=8, hidden=16) for _ in range(3))

    def forward(self, x: Tensor, repeats: bool) -> Tensor:
        for position, block in enumerate(self.blocks):
            x = block(x)
            if repeats and not position:
                x = block(x)
        return x


@cache
def impatient(_name: str) -> DeviceMesh:
    """A mesh of two ranks on a group of its own, which breaks after three seconds of waiting."""
    groups = [
        dist.new_group([first, first + 1], timeout=timedelta(seconds=3))
        for first in range(0, WORLD, 2)
    ]
    return DeviceMesh.from_group(groups[dist.get_rank() // 2], "cpu")


@pytest.mark.sample
@pytest.mark.parametrize("transport", ["point_to_point", "point_to_point without tags", "native"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_of_different_units_never_mix(strategy: str, transport: str) -> None:
    """Right up to the pass that one rank runs otherwise; in evaluation, where nothing reduces."""
    torch.manual_seed(1)
    plain = Repeating().double()
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        if transport.endswith("without tags"):  # as NCCL's messages
            patch.setattr(point_to_point, "carries_tags", lambda _group: False)
        model = fully_shard_model(
            Repeating().double(),
            device_mesh=impatient(transport),
            fsdp_unit_modules=[Block],
            zero_dp_strategy=strategy,
            mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
            transport=transport.partition(" ")[0],
        )

    def evaluate(seed: int, repeats: bool) -> None:
        near(f"{seed}", model(own_batch(seed), repeats), plain(own_batch(seed), repeats))

    with torch.no_grad():
        evaluate(0, True)
        evaluate(1, True)
        if strategy == "optim_grads_params":
            with pytest.raises(LifecycleError, match="run it equally often in a pass"):
                evaluate(2, dist.get_rank() % 2 == 0)
        else:
            evaluate(2, dist.get_rank() % 2 == 0)
