"""R11: experts are divided by the dense data-parallel size, worked out by hand.

The weight's gradient is its input. Four dense ranks send r + 1 to the expert of each rank's group;
an expert that two ranks share gets (1 + 2 + 3 + 4) over both of them, and one of a single rank gets
all of it at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, gather_full
from oracle.models import KnownGradient
from oracle.ranks import RankPool, mesh
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.processes


def expert_gradient(strategy: str, sharers: int, average: bool) -> list[float]:
    """Distinct values of the gradient of an expert that `sharers` of four ranks share."""
    module = nn.Sequential(KnownGradient())
    module[0].weight.allreduce = False
    experts = init_device_mesh("cpu", (sharers, 4 // sharers), mesh_dim_names=("dp", "ep"))
    model: Any = fully_shard_model(
        module,
        device_mesh=mesh(4),
        dp_shard_dim="dp",
        expt_device_mesh=experts,
        fsdp_unit_modules=[KnownGradient],
        zero_dp_strategy=strategy,
        sync_model_each_microbatch=False,
        average_in_collective=average,
        mixed_precision_policy=MixedPrecisionPolicy(),
    )
    # What the ranks of this one's expert-parallel group would send to it.
    sent = sum(rank + 1 for rank in experts["ep"].mesh.tolist())
    for _ in range(2):
        model(torch.full((4, 2), float(sent))).backward()
    model.finish_grad_sync()
    (parameter,) = model.parameters()
    return sorted(set(gather_full(parameter.grad).flatten().tolist()))


@pytest.mark.sample
@pytest.mark.parametrize("average", [False, True], ids=["scaled", "in-collective"])
@pytest.mark.parametrize("sharers", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_r11_experts_are_divided_by_the_dense_size(
    ranks: RankPool, strategy: str, sharers: int, average: bool
) -> None:
    # Two microbatches of (1 + 2 + 3 + 4) / 4.
    assert ranks.run(expert_gradient, strategy, sharers, average) == [[5.0]] * 4
