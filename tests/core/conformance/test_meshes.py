"""Four ranks in every arrangement: axes, groups, transports, and what cannot be arranged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mfsdp_core
from conformance.judging import refuses, same
from conformance.small_model import Unit, batch, pair
from mfsdp_core.comm.agreement import from_first, together
from mfsdp_core.errors import (
    CapabilityNotBuiltError,
    CheckpointError,
    ConfigurationError,
    GradAlreadyReducedError,
    StateDictError,
)

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(4)]

_WORLD = 4


_ROWS, _COLUMNS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


def _square() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def _two_axes(**more: Any) -> dict[str, Any]:
    return {
        "device_mesh": _square(),
        "dp_shard_dim": "inner",
        "dp_outer_dim": "outer",
        "hybrid_fsdp_group": dist.group.WORLD,
        **more,
    }


def test_the_meshes_and_groups_that_are_in_force() -> None:
    """Of one axis and of two, with a group for gathers, and of a mesh that nobody gave."""
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks
    model, _ = pair(3, **_two_axes(outer_dp_sharding_strategy=1))
    same("all", ranks(model.axes_of(is_expert=False).data_group), [0, 1, 2, 3])
    fsdp = ranks(model.dist_index.get_fsdp_group())
    same("the inner axis", fsdp, [rank // 2 * 2, rank // 2 * 2 + 1])
    named = {name: ranks(group) for name, group in model.axes_of(is_expert=False).named_groups()}
    own = {"inner": [rank // 2 * 2, rank // 2 * 2 + 1], "outer": [rank % 2, rank % 2 + 2]}
    same("by name", named, own)
    mesh = init_device_mesh("cpu", (_WORLD,), mesh_dim_names=("dp",))
    gathers = dist.new_group(list(range(_WORLD)))
    flat, _ = pair(3, device_mesh=mesh, dp_shard_dim="dp", fsdp_group_ag=gathers)
    axes = flat.axes_of(is_expert=False)
    seen = axes.has_outer_axis, axes.mesh is mesh, axes.gather_group is gathers
    same("flat, and for gathers", seen, (False, True, True))
    nameless, _ = pair(3)
    same("nameless", ranks(nameless.dist_index.get_fsdp_group()), [0, 1, 2, 3])


def test_what_cannot_be_arranged_is_refused() -> None:
    """Groups and dimensions that do not fit each other."""
    square, world = _square(), dist.group.WORLD
    pairs = [dist.new_group(list(r)) for r in ((0, 1), (2, 3))]
    flat = init_device_mesh("cpu", (_WORLD,), mesh_dim_names=("dp",))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    two = _two_axes()
    for words, arguments in (
        (
            "found only dp_outer_dim",
            {"device_mesh": square, "dp_shard_dim": "inner", "dp_outer_dim": "outer"},
        ),
        ("found only hybrid_fsdp_group", {"device_mesh": flat, "hybrid_fsdp_group": world}),
        ("name dimensions of device_mesh", {"dp_shard_dim": "dp"}),
        ("say which", {"device_mesh": square}),
        ("need dp_shard_dim", {"device_mesh": square, "tp_dim": "inner"}),
        ("cannot take the dimensions ('x',)", {"device_mesh": square, "dp_shard_dim": "x"}),
        (
            "The outer dimension comes before the inner one",
            _two_axes() | {"dp_shard_dim": "outer", "dp_outer_dim": "inner"},
        ),
        (
            "the tensor-parallel one after both",
            {"device_mesh": square, "dp_shard_dim": "inner", "tp_dim": "outer"},
        ),
        (
            "expt_fsdp_group_ag must hold the ranks of the inner axis in order",
            {
                "device_mesh": flat,
                "dp_shard_dim": "dp",
                "expt_device_mesh": experts,
                "expt_fsdp_group_ag": world,
            },
        ),
        (
            "of expt_device_mesh, which has ('outer', 'inner')",
            {"device_mesh": flat, "dp_shard_dim": "dp", "expt_device_mesh": square},
        ),
        ("expt_device_mesh, and there is none", {"device_mesh": flat, "expt_fsdp_group_ag": world}),
        (
            "expt_device_mesh, and there is none",
            {"device_mesh": flat, "hybrid_fsdp_expt_group": world},
        ),
        ("found only dp_outer_dim", _two_axes(expt_device_mesh=square)),
        (
            "the inner axis in order",
            {"device_mesh": square, "dp_shard_dim": "inner", "fsdp_group_ag": world},
        ),
        ("shards it too", _two_axes(outer_dp_sharding_strategy=1, zero_dp_strategy=0)),
    ):
        said: dict[str, Any] = {"zero_dp_strategy": 3, **arguments}
        strategy = said.pop("zero_dp_strategy")
        refuses(ConfigurationError, words, pair, strategy, **said)
    rows, columns = (DeviceMesh("cpu", r, mesh_dim_names=("r", "dp")) for r in (_ROWS, _COLUMNS))
    refuses(
        ConfigurationError,
        "must be a part of those of device_mesh",
        pair,
        3,
        device_mesh=rows["dp"],
        expt_device_mesh=columns["dp"],
    )
    marked: Any = Unit()
    marked.up.weight.allreduce = False
    refuses(
        ConfigurationError,
        "up.weight is marked as an expert's (allreduce=False)",
        mfsdp_core.fully_shard_model,
        marked,
    )
    if dist.get_rank() < 2:
        wrong = two | {"hybrid_fsdp_group": pairs[0]}
        refuses(ConfigurationError, "must hold the ranks of both axes", lambda: pair(3, **wrong))
    dist.barrier()


def test_a_microbatch_behind_the_outer_stage_is_refused() -> None:
    for strategy in range(4):
        model, _ = pair(strategy, **_two_axes())
        model(batch(0)).backward()
        words = "already reduced in this cycle"
        refuses(GradAlreadyReducedError, words, lambda m=model: m(batch(1)).backward())
        model.zero_grad()


def test_ranks_agree_on_errors() -> None:
    """Whoever fails, all raise the same; results come from the first or from each."""
    group, rank = dist.group.WORLD, dist.get_rank()

    def fails(who: int, error: Exception) -> int:
        if rank == who:
            raise error
        return 10 + rank

    same("each its own", together(group, fails, 9, ValueError()), 10 + rank)
    same("of the first", from_first(group, fails, 9, ValueError()), 10)
    full, disk = ValueError("full"), OSError("disk")
    refuses(CheckpointError, "rank 2: ValueError: full", together, group, fails, 2, full)
    refuses(StateDictError, "as it is", together, group, fails, 3, StateDictError("as it is"))
    refuses(CheckpointError, "rank 0: OSError: disk", from_first, group, fails, 0, disk)
    same("others do not run it", from_first(group, fails, 1, OSError()), 10)


def test_checkpoints_of_spread_experts_are_refused(tmp_path: Path) -> None:
    """Different experts go by equal names; experts that all ranks share are saved."""
    dense = init_device_mesh("cpu", (_WORLD,), mesh_dim_names=("dp",))
    spread = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    for experts in (spread, dense):
        module: Any = Unit()
        module.down.weight.allreduce = False
        model = mfsdp_core.fully_shard_model(
            module, device_mesh=dense, dp_shard_dim="dp", expt_device_mesh=experts
        )
        if experts is dense:
            same("all", dist.get_process_group_ranks(model.checkpoint_group), [0, 1, 2, 3])
            continue
        refuses(
            CapabilityNotBuiltError,
            "different experts go by equal names",
            mfsdp_core.save_checkpoint,
            tmp_path / "saved",
            model,
        )
