"""R15: a weight cut along dim 1 by tensor parallelism is sharded by its local rows.

Two data-parallel ranks times two tensor-parallel ones; the weight's gradient is what its input is
multiplied with, so every expected number is worked out by hand.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, gather_full
from oracle.ranks import RankPool
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.processes

WEIGHT = torch.arange(24.0).view(4, 6)


@cache
def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Rowwise(nn.Module):
    """Multiplies the part of its weight that this rank holds."""

    def __init__(self) -> None:
        super().__init__()
        cut = distribute_tensor(WEIGHT, two_by_two()["tp"], [Shard(1)])
        self.weight = nn.Parameter(cut)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.to_local() * x).sum()


def rowwise(strategy: str) -> tuple[list[int], bool, list[float]]:
    """Local shape of the shard, whether the whole weight is itself, and the gradient's values."""
    model: Any = fully_shard_model(
        nn.Sequential(Rowwise()),
        device_mesh=two_by_two(),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Rowwise],
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(),
    )
    data_rank = two_by_two().get_local_rank("dp")
    model(torch.full((4, 3), float(data_rank + 1))).backward()
    (parameter,) = model.parameters()
    whole = torch.equal(gather_full(parameter), WEIGHT)
    gradient = gather_full(parameter.grad)
    assert gradient.shape == WEIGHT.shape
    return list(parameter.to_local().shape), whole, sorted(set(gradient.flatten().tolist()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_r15_a_rowwise_weight_keeps_its_local_trailing_shape(
    ranks: RankPool, strategy: str
) -> None:
    rows = 4 if strategy == "no_shard" else 2
    assert ranks.run(rowwise, strategy) == [([rows, 3], True, [1.5])] * 4
