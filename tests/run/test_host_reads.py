"""A step in which the host waits for nothing: models of every preset, made small, over mfsdp.

On torch's fake process group, where collectives leave memory as it is.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mfsdp_core
from bench.derive.counts import CountRow
from bench.meters.call_sites import CallSites
from bench.meters.operation_counter import OperationCounter
from bench.models.build import build_model
from bench.resolve.presets import PRESETS

pytestmark = pytest.mark.usefixtures("fake_group")
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
#: What the models read on a CPU alone: without a grouped product, experts are called one by one.
ON_A_CPU = "bench/models/experts.py:Experts.forward"


def reads(
    model: nn.Module, batch: Tensor, units: list[type[nn.Module]], **options
) -> list[CountRow]:
    """By the host in the fourth step: two microbatches, clipping, AdamW."""
    sharded = mfsdp_core.fully_shard_model(model, fsdp_unit_modules=units, **options)
    optimizer = mfsdp_core.fully_shard_optimizer(torch.optim.AdamW(sharded.parameters(), lr=0.1))

    def step() -> None:
        with sharded.no_sync():
            sharded(batch, batch).backward()
        with sharded.sync():
            sharded(batch, batch).backward()
        mfsdp_core.clip_grad_norm_(sharded, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    counter = OperationCounter(CallSites())
    with counter.counting():
        step()
    return [row for row in counter.rows() if row.kind == "host_read"]


@pytest.mark.sample
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("preset", PRESETS)
def test_no_step_of_a_preset_waits_for_the_device(preset: str, strategy: str) -> None:
    shape = PRESETS[preset]
    small = {"layers": 2, "hidden": 32, "ffn_hidden": 48, "heads": 4, "head_dim": 8, "vocab": 64}
    small["kv_heads"] = 4 * shape.kv_heads // shape.heads or 1
    if shape.hybrid is not None:
        pattern = "".join(dict.fromkeys(shape.hybrid.pattern))
        sizes = {"mamba_heads": 2, "mamba_head_dim": 16, "mamba_groups": 1, "state": 8, "chunk": 8}
        experts = {"experts": 4, "experts_per_token": 2, "expert_hidden": 16}
        changed = {"pattern": pattern, "shared_expert_hidden": 16} | sizes | experts
        small |= {"layers": len(pattern), "hybrid": shape.hybrid.model_copy(update=changed)}
    model = build_model(
        shape.model_copy(update=small), recompute="none", seed=0, device=torch.device("cpu")
    )
    batch = torch.randint(0, 64, (2, 16))
    found = reads(model, batch, list(model.unit_classes), zero_dp_strategy=strategy)
    assert {row.site for row in found} <= {ON_A_CPU}, found


class Choosing(nn.Module):
    """One of several experts, and the others not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return self.experts[0](x).square().mean()


def test_a_parameter_that_this_rank_leaves_out_costs_one_read_behind_the_backward_pass() -> None:
    (found,) = reads(Choosing(), torch.ones(2, 8), [nn.Linear])
    assert (found.count, found.operation) == (1, "Tensor.tolist")
    assert found.site == "mfsdp_core/comm/usage.py:unused_by_all"
