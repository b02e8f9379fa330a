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
from oracle.beside_torch import own_batch, refusal
from oracle.models import Block
from oracle.ranks import WORLD, RankPool
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.processes


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


def repeated_on_one_rank(strategy: str, name: str) -> tuple[str, list[float]]:
    """What is said, and the errors of outputs up to then; in evaluation, where nothing reduces."""
    torch.manual_seed(1)
    plain = Repeating().double()
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        if name.endswith("without tags"):  # as NCCL's messages
            patch.setattr(point_to_point, "carries_tags", lambda _group: False)
        model = fully_shard_model(
            Repeating().double(),
            device_mesh=impatient(name),
            fsdp_unit_modules=[Block],
            zero_dp_strategy=strategy,
            mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
            transport=name.partition(" ")[0],
        )
    errors: list[float] = []

    def evaluate() -> None:
        for seed, repeats in enumerate((True, True, dist.get_rank() % 2 == 0)):
            with torch.no_grad():
                found = model(own_batch(seed), repeats)
                errors.append(float((found - plain(own_batch(seed), repeats)).norm()))

    return refusal(evaluate, LifecycleError), errors


@pytest.mark.sample
@pytest.mark.parametrize("transport", ["point_to_point", "point_to_point without tags", "native"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_of_different_units_never_mix(
    ranks: RankPool, strategy: str, transport: str
) -> None:
    for said, errors in ranks.run(repeated_on_one_rank, strategy, transport):
        assert max(errors) < 1e-12
        if strategy == "optim_grads_params":
            assert "run it equally often in a pass" in said
        else:
            assert len(errors) == 3
            assert not said
