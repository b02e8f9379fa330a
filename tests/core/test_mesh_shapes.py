"""Meshes with more dimensions than sharding uses, and flattened ones, as upstream's users write."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model
from oracle.beside_torch import Pair
from oracle.meshes import Shape
from oracle.models import TOYS, batch, build

pytestmark = pytest.mark.on_ranks

NAME = "linear_stack"


SHAPES = {
    "dp2_cp2": Shape((2, 2), ("dp", "cp"), "dp_cp", ("dp", "cp")),
    "outer2_dp1_cp2": Shape((2, 1, 2), ("outer", "dp", "cp"), "dp_cp", ("dp", "cp"), "outer"),
    "outer2_dp2_cp1_tp1": Shape(
        (2, 2, 1, 1), ("outer", "dp", "cp", "tp"), "dp_cp", ("dp", "cp"), "outer", "tp"
    ),
    "pp2_dp1_cp2_tp1": Shape(
        (2, 1, 2, 1), ("pp", "dp", "cp", "tp"), "dp_cp", ("dp", "cp"), None, "tp"
    ),
    "pp2_dp2": Shape((2, 2), ("pp", "dp"), "dp"),
    "dp2_other2": Shape((2, 2), ("dp", "other"), "dp"),
    "pp1_outer2_dp2": Shape((1, 2, 2), ("pp", "outer", "dp"), "dp", (), "outer"),
}


@pytest.mark.parametrize(
    ("name", "inner", "outer"),
    [
        *((name, "optim_grads_params", "no_shard") for name in SHAPES),
        ("outer2_dp1_cp2", "optim", "optim"),
        ("outer2_dp2_cp1_tp1", "no_shard", "no_shard"),
        ("pp1_outer2_dp2", "optim_grads", "optim"),
    ],
)
def test_only_the_named_dimensions_share_parameters_and_gradients(
    name: str, inner: str, outer: str
) -> None:
    model = fully_shard_model(
        build(NAME, torch.float64),
        fsdp_unit_modules=list(TOYS[NAME].units),
        zero_dp_strategy=inner,
        outer_dp_sharding_strategy=outer,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float64),
        sync_model_each_microbatch=False,
        **SHAPES[name].arguments(),
    )
    pair = Pair(build(NAME, torch.float64), model, dist.group.WORLD)
    pair.backward(*(batch(NAME, SHAPES[name].data_rank(), j, torch.float64) for j in range(2)))
    pair.compare_gradients()


@pytest.mark.parametrize("where", [{}, {"dp_shard_dim": "dp_cp"}])
def test_a_flattened_mesh_may_be_the_argument_itself(where: dict[str, str]) -> None:
    flat = SHAPES["dp2_cp2"].root()["dp", "cp"]._flatten("dp_cp")
    model = fully_shard_model(build(NAME), device_mesh=flat, **where)
    assert next(model.parameters()).device_mesh.mesh.tolist() == [0, 1, 2, 3]
