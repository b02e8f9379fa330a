"""Meshes with more dimensions than sharding uses, and flattened ones, as upstream's users write."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, gather_full
from oracle.models import TOYS, batch, build, loss
from oracle.ranks import RankPool
from oracle.reference import expected_gradient, relative_difference
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.processes

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
HYBRID = [name for name, shape in SHAPES.items() if shape.outer]


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


def gradient_errors(name: str, inner: str, outer: str) -> list[float]:
    model: Any = fully_shard_model(
        build(NAME, torch.float64),
        fsdp_unit_modules=list(TOYS[NAME].units),
        zero_dp_strategy=inner,
        outer_dp_sharding_strategy=outer,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float64),
        **arguments(name),
    )
    rank, size = data_rank(name)
    errors = []
    for cycle, microbatches in enumerate((1, 2)):
        for j in range(microbatches):
            model.set_model_auto_sync(j == microbatches - 1)
            loss(model(batch(NAME, rank, j, torch.float64, cycle))).backward()
        found = {
            key.removeprefix("module."): gather_full(p.grad) for key, p in model.named_parameters()
        }
        expected = expected_gradient(NAME, size, microbatches, torch.float64, cycle)
        errors.append(relative_difference(found, expected))
        model.zero_grad_buffer()
    return errors


def flattened_mesh_itself(named: bool) -> list[int]:
    """Ranks that a parameter is sharded over when the flattened mesh is the argument."""
    root = root_mesh("dp2_cp2")
    flat = root["dp", "cp"]._flatten("dp_cp")
    model = fully_shard_model(
        build(NAME), device_mesh=flat, **({"dp_shard_dim": "dp_cp"} if named else {})
    )
    return next(model.parameters()).device_mesh.mesh.tolist()


@pytest.mark.sample
@pytest.mark.parametrize("inner", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("name", SHAPES)
def test_only_the_named_dimensions_share_parameters_and_gradients(
    ranks: RankPool, name: str, inner: str
) -> None:
    for errors in ranks.run(gradient_errors, name, inner, "no_shard"):
        assert max(errors) < 1e-12


@pytest.mark.sample
@pytest.mark.parametrize("inner", STRATEGIES[1:])
@pytest.mark.parametrize("name", HYBRID)
def test_an_outer_dimension_stands_beside_a_flattened_one(
    ranks: RankPool, name: str, inner: str
) -> None:
    for errors in ranks.run(gradient_errors, name, inner, "optim"):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("named", [False, True])
def test_a_flattened_mesh_may_be_the_argument_itself(ranks: RankPool, named: bool) -> None:
    assert ranks.run(flattened_mesh_itself, named) == [[0, 1, 2, 3]] * 4
