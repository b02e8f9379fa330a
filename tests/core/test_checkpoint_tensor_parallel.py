"""Checkpoints of models with tensor parallelism, which load without it, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_core import (
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from oracle.checkpoints import different, whole
from oracle.ranks import mesh
from oracle.tensor_parallel import VARIANTS, TpBlock, build_parallel, build_twin, tokens_of, tp_loss

pytestmark = pytest.mark.on_ranks


def trained(module: Any, seed: int, **where: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A model that has taken `seed` steps on batches that all ranks share."""
    model = fully_shard_model(
        module,
        dp_shard_dim="dp",
        fsdp_unit_modules=[TpBlock],
        mixed_precision_policy=MixedPrecisionPolicy(torch.float64),
        **where,
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in range(seed):
        tp_loss(model(tokens_of(0, step, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("variant", VARIANTS)
def test_r15_checkpoints_cross_tensor_parallelism(variant: str, tmp_path: Path) -> None:
    """Saved with tensor parallelism, loaded without, saved, loaded with."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = {"device_mesh": root, "tp_dim": "tp"}
    source = trained(build_parallel(root["tp"], variant), 2, **parallel)
    plain = trained(build_twin(), 1, device_mesh=mesh(4))
    back = trained(build_parallel(root["tp"], variant), 1, **parallel)
    expected = whole(*source)
    save_checkpoint(tmp_path / "parallel", *source)
    load_checkpoint(tmp_path / "parallel", *plain)
    save_checkpoint(tmp_path / "plain", *plain)
    load_checkpoint(tmp_path / "plain", *back)
    for found in (whole(*plain), whole(*back)):
        assert different(found, expected) == []
