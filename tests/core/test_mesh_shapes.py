"""Meshes with more dimensions than sharding uses, and flattened ones, as upstream's users write."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model
from oracle.cycles import Twins
from oracle.models import TOYS, batch, build, loss
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.on_ranks

NAME = "linear_stack"


@dataclass(frozen=True)
class Shape:
    """flattened: dimensions that become one, by its name. shard, outer: as the arguments."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    shard: str
    flattened: tuple[str, ...] = ()
    outer: str | None = None
    tensor: str | None = None


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


@cache
def root_mesh(name: str) -> DeviceMesh:
    shape = SHAPES[name]
    root = init_device_mesh("cpu", shape.sizes, mesh_dim_names=shape.names)
    if shape.flattened:
        root[shape.flattened]._flatten(shape.shard)
    if shape.outer:
        root[shape.outer, *(shape.flattened or (shape.shard,))]._flatten("hybrid")
    return root


def arguments(name: str) -> dict[str, Any]:
    shape, root = SHAPES[name], root_mesh(name)
    given = {"device_mesh": root, "dp_shard_dim": shape.shard, "tp_dim": shape.tensor}
    if shape.outer:
        given["dp_outer_dim"] = shape.outer
        given["hybrid_fsdp_group"] = hybrid_group(name)
    return {key: value for key, value in given.items() if value is not None}


def hybrid_group(name: str) -> dist.ProcessGroup:
    root = root_mesh(name)
    kept = (SHAPES[name].outer, *(SHAPES[name].flattened or (SHAPES[name].shard,)))
    return root[kept]._flatten("hybrid").get_group()


def data_rank(name: str) -> tuple[int, int]:
    """This rank among those that share its parameters, and their number; from the mesh alone."""
    shape, root = SHAPES[name], root_mesh(name)
    number, size = 0, 1
    for dim in ((shape.outer,) if shape.outer else ()) + (shape.flattened or (shape.shard,)):
        number = number * root[dim].size() + root.get_local_rank(dim)
        size *= root[dim].size()
    return number, size


def inputs(rank: int, microbatch: int, cycle: int) -> torch.Tensor:
    return batch(NAME, rank, microbatch, torch.float64, cycle)


@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "inner", "outer"),
    [
        *((name, s, "no_shard") for name in SHAPES for s in ("no_shard", "optim_grads_params")),
        *((name, s, "optim") for name in SHAPES if SHAPES[name].outer for s in STRATEGIES[1:]),
    ],
)
def test_only_the_named_dimensions_share_parameters_and_gradients(
    name: str, inner: str, outer: str
) -> None:
    """Gradients of cycles are those of one process."""
    model = fully_shard_model(
        build(NAME, torch.float64),
        fsdp_unit_modules=list(TOYS[NAME].units),
        zero_dp_strategy=inner,
        outer_dp_sharding_strategy=outer,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float64),
        sync_model_each_microbatch=False,
        **arguments(name),
    )
    plain = build(NAME, torch.float64)
    Twins(model, plain, loss, inputs, *data_rank(name)).compare_gradients()


@pytest.mark.parametrize("where", [{}, {"dp_shard_dim": "dp_cp"}])
def test_a_flattened_mesh_may_be_the_argument_itself(where: dict[str, str]) -> None:
    flat = root_mesh("dp2_cp2")["dp", "cp"]._flatten("dp_cp")
    model = fully_shard_model(build(NAME), device_mesh=flat, **where)
    assert next(model.parameters()).device_mesh.mesh.tolist() == [0, 1, 2, 3]
