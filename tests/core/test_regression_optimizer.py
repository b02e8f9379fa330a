"""R4: making the optimizer's state early must not count as a step of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mfsdp_core import fully_shard, gather_full
from oracle.models import KnownGradient
from oracle.ranks import RankPool, mesh

pytestmark = pytest.mark.processes


def weights_after_one_step(strategy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight after one step of ours, and of torch alone with the mean gradient 1.5."""
    options = {"lr": 0.1, "weight_decay": 0.0}
    module = nn.Sequential(KnownGradient())
    model: Any
    model, optimizer = fully_shard(
        module,
        torch.optim.Adam(module.parameters(), **options),
        device_mesh=mesh(2),
        dp_shard_dim="dp",
        fsdp_unit_modules=[KnownGradient],
        zero_dp_strategy=strategy,
    )
    rank = mesh(2).get_local_rank("dp")
    # Two different steps: bias correction by a phantom step shows in the sum of both.
    plain = nn.Parameter(torch.ones(4, 2))
    reference = torch.optim.Adam([plain], **options)
    for scale in (1.0, 5.0):
        model(torch.full((4, 2), scale * (rank + 1))).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.grad = torch.full((4, 2), scale * 1.5)
        reference.step()
    (parameter,) = model.parameters()
    return gather_full(parameter.detach()), plain.detach()


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_r4_no_phantom_adam_step(ranks: RankPool, strategy: str) -> None:
    for found, expected in ranks.run(weights_after_one_step, strategy):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
