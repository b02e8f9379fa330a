"""Four ranks in every arrangement: axes, groups, transports, and what cannot be arranged."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import mfsdp_core
from conformance.judging import close, refuses, same
from conformance.small_model import (
    Unit,
    batch,
    compare_gradients,
    compare_weights,
    pair,
    plain_backward,
    whole_weights,
)
from conformance.stateful import shared_folder
from mfsdp_core.comm.agreement import from_first, together
from mfsdp_core.errors import (
    CapabilityNotBuiltError,
    CheckpointError,
    ConfigurationError,
    LayoutError,
    StateDictError,
)
from mfsdp_core.shard.dtensor import assembly_order

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


def test_the_index_holds_the_meshes_and_groups_that_are_in_force() -> None:
    """Of one axis and of two, with a group for gathers, and of a mesh that nobody gave."""
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks
    model, _ = pair(3, **_two_axes(outer_dp_sharding_strategy=1))
    index = model.dist_index
    same("hybrid", (index.dp_outer_dim, index.hsdp_outer_dp_shard), ("outer", True))
    same("all", ranks(index.hybrid_fsdp_group), [0, 1, 2, 3])
    named = {name: ranks(group) for name, group in model._dense.named_groups()}
    own = {"inner": [rank // 2 * 2, rank // 2 * 2 + 1], "outer": [rank % 2, rank % 2 + 2]}
    same("by name", named, own)
    mesh = init_device_mesh("cpu", (_WORLD,), mesh_dim_names=("dp",))
    gathers = dist.new_group(list(range(_WORLD)))
    flat, _ = pair(3, device_mesh=mesh, dp_shard_dim="dp", fsdp_group_ag=gathers)
    index = flat.dist_index
    same("flat", (index.dp_outer_dim, index.device_mesh is mesh), (None, True))
    same("for gathers", index.fsdp_group_ag is gathers, True)
    nameless, _ = pair(3)
    same("nameless", ranks(nameless.dist_index.device_mesh.get_group(0)), [0, 1, 2, 3])


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
        refuses(ConfigurationError, words, lambda s=said, n=strategy: pair(n, **s))
    rows, columns = (DeviceMesh("cpu", r, mesh_dim_names=("r", "dp")) for r in (_ROWS, _COLUMNS))
    refuses(
        ConfigurationError,
        "must be a part of those of device_mesh",
        lambda: pair(3, device_mesh=rows["dp"], expt_device_mesh=columns["dp"]),
    )
    marked: Any = Unit()
    marked.up.weight.allreduce = False
    refuses(
        ConfigurationError,
        "up.weight is marked as an expert's (allreduce=False)",
        lambda: mfsdp_core.fully_shard_model(marked),
    )
    if dist.get_rank() < 2:
        wrong = two | {"hybrid_fsdp_group": pairs[0]}
        refuses(ConfigurationError, "must hold the ranks of both axes", lambda: pair(3, **wrong))
    dist.barrier()


def test_every_arrangement_trains_as_plain_torch() -> None:
    """Transports on flat and hybrid meshes; two microbatches, two steps, and whole weights."""
    for transport, cells in (
        ("native", ((2, 1),)),
        ("point_to_point", ((0, None), (3, 1), (0, 0), (1, None))),
    ):
        for strategy, outer in cells:
            where = {} if outer is None else _two_axes(outer_dp_sharding_strategy=outer)
            average = strategy % 2 == 1
            model, plain = pair(
                strategy, transport=transport, average_in_collective=average, **where
            )
            optimizer = mfsdp_core.fully_shard_optimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            )
            reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
            for step in range(2):
                with model.no_sync():
                    model(batch(2 * step)).backward()
                model(batch(2 * step + 1)).backward()
                plain_backward(plain, 2 * step, 2 * step + 1)
                compare_gradients(model, plain)
                wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
                close("norm", mfsdp_core.clip_grad_norm_(model, 0.05), wanted)
                optimizer.step()
                optimizer.zero_grad()
                reference.step()
                reference.zero_grad()
            compare_weights(model, plain)
            groups = ("inner",) if outer is None else ("inner", "outer")
            same("transports", dict(model.transports), dict.fromkeys(groups, transport))


def test_tensor_parallel_gradients_are_brought_home() -> None:
    """A replicated weight whose gradient is a partial sum; rows that three axes cut."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor = mesh["tp"]

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            value = torch.arange(1.0, 6.0, dtype=torch.float64)
            self.weight = torch.nn.Parameter(distribute_tensor(value, tensor, [Replicate()]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows: Any = distribute_tensor(x, tensor, [Shard(0)])
            scaled = (rows * self.weight).redistribute(placements=[Replicate()])
            out: torch.Tensor = scaled.to_local()
            return out

    policy = mfsdp_core.MixedPrecisionPolicy(None)
    for strategy in (0, 3):
        model = mfsdp_core.fully_shard_model(
            Scaled(),
            mesh,
            "dp",
            tp_dim="tp",
            zero_dp_strategy=strategy,
            mixed_precision_policy=policy,
        )
        own = mesh.get_local_rank("dp")
        model(batch(0, own)[:2]).square().sum().backward()
        weight = torch.arange(1.0, 6.0, dtype=torch.float64, requires_grad=True)
        losses = [(batch(0, rank)[:2] * weight).square().sum() for rank in (0, 1)]
        (torch.stack(losses).sum() / 2).backward()
        (parameter,) = model.parameters()
        close("gradient", mfsdp_core.gather_full(parameter.grad), weight.grad)
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("outer", "inner", "tp"))
    linear: Any = torch.nn.Linear(3, 8, bias=False)
    linear.weight._tensor_parallel_mode = "column"
    model = mfsdp_core.fully_shard_model(
        linear,
        cube,
        "inner",
        "outer",
        "tp",
        hybrid_fsdp_group=cube["outer", "inner"]._flatten().get_group(),
        outer_dp_sharding_strategy=1,
    )
    (parameter,) = model.parameters()
    factors = [getattr(p, "split_factor", None) for p in parameter.placements]
    same("cuts before", factors, [2, 2, None])


def test_sums_are_taken_in_the_order_of_ranks() -> None:
    """To the bit, whoever comes first, in every dtype on the wire."""
    cells = ((0, torch.bfloat16), (2, torch.float32), (0, torch.float32), (1, torch.bfloat16))
    for strategy, wire in cells:
        policy = mfsdp_core.MixedPrecisionPolicy(None, torch.float32, wire)
        model, plain = pair(
            strategy,
            dtype=torch.float32,
            transport="point_to_point",
            mixed_precision_policy=policy,
            calculate_per_token_loss=True,
        )
        model(batch(dtype=torch.float32)).backward()
        parts = []
        for rank in range(_WORLD):
            plain.zero_grad()
            plain(batch(0, rank, torch.float32)).backward()
            parts.append({n: p.grad.to(wire) for n, p in plain.named_parameters()})
        for name, p in model.named_parameters():
            own = [part[name.removeprefix("module.")].float() for part in parts]
            total = own[0] + own[1] + own[2] + own[3]
            total = total.to(wire).float() if strategy == 0 else total
            same(f"{strategy} {name}", mfsdp_core.gather_full(p.grad), total)


def test_tensors_that_torch_has_cut_are_put_together() -> None:
    """Of three dims, by every pair of cuts on two axes."""
    square = _square()
    whole = torch.arange(8.0 * 4 * 3).view(8, 4, 3)
    for placements in product((Shard(0), Shard(1), Replicate()), repeat=2):
        cut = distribute_tensor(whole, square, list(placements))
        same(f"{placements}", mfsdp_core.gather_full(cut), whole)
    apart = (Shard(0), _StridedShard(0, split_factor=2))
    refuses(LayoutError, "do not lie together", lambda: assembly_order(apart))


def test_weights_are_made_equal_along_replicas() -> None:
    """`broadcast_params` on two axes: of the first outer rank where the outer axis replicates."""
    for strategy, outer in ((0, 0), (1, 0), (3, 0)):
        model, plain = pair(strategy, **_two_axes(outer_dp_sharding_strategy=outer))
        with torch.no_grad():
            for p in model.parameters():
                p.detach().to_local().add_(
                    0 if dist.get_rank() in (0, 1) and strategy else dist.get_rank()
                )
        model.broadcast_params()
        if strategy:
            compare_weights(model, plain)
        else:
            same(
                "alike",
                all(
                    torch.equal(v, plain.get_parameter(n)) for n, v in whole_weights(model).items()
                ),
                True,
            )


def test_ranks_agree_on_errors() -> None:
    """Whoever fails, all raise the same; results come from the first or from each."""
    group, rank = dist.group.WORLD, dist.get_rank()

    def fails(who: int, error: Exception) -> int:
        if rank == who:
            raise error
        return 10 + rank

    same(
        "each its own", together(group, lambda: fails(9, ValueError()), CheckpointError), 10 + rank
    )
    same("of the first", from_first(group, lambda: fails(9, ValueError()), CheckpointError), 10)
    refuses(
        CheckpointError,
        "rank 2: ValueError: full",
        lambda: together(group, lambda: fails(2, ValueError("full")), CheckpointError),
    )
    refuses(
        StateDictError,
        "as it is",
        lambda: together(group, lambda: fails(3, StateDictError("as it is")), CheckpointError),
    )
    refuses(
        CheckpointError,
        "rank 0: OSError: disk",
        lambda: from_first(group, lambda: fails(0, OSError("disk")), CheckpointError),
    )
    same(
        "others do not run it", from_first(group, lambda: fails(1, OSError()), CheckpointError), 10
    )


def test_units_of_all_depths_are_found() -> None:
    """By class and by path; nested ones too where that is asked for."""
    by_path, plain = pair(3, fsdp_unit_modules=[f"{Unit.__module__}.Unit"])
    same("by path", {b.unit for b in by_path.buckets()}, {"", "units.0", "units.1"})
    nested, plain = pair(3, fsdp_unit_modules=[Unit, torch.nn.Linear], nested_units="all")
    names = {b.unit for b in nested.buckets()}
    same("nested", "units.0.up" in names and "units.1.down" in names, True)
    outermost, _ = pair(3, fsdp_unit_modules=[Unit, torch.nn.Linear])
    same("outermost", {b.unit for b in outermost.buckets()}, {"", "units.0", "units.1"})
    nested(batch()).backward()
    plain_backward(plain, 0)
    compare_gradients(nested, plain)


def test_checkpoints_of_spread_experts_are_refused() -> None:
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
        with shared_folder() as folder:
            refuses(
                CapabilityNotBuiltError,
                "different experts go by equal names",
                lambda m=model, f=folder: mfsdp_core.save_checkpoint(f / "saved", m),
            )


def test_three_ranks_scale_by_a_third() -> None:
    """Gradients in BF16 are divided in FP32, in which they are reduced."""
    mesh = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("dp",))
    if dist.get_rank() < 3:
        policy = mfsdp_core.MixedPrecisionPolicy(torch.float32, torch.float32, torch.float32)
        where = {"device_mesh": mesh, "dp_shard_dim": "dp", "mixed_precision_policy": policy}
        model, plain = pair(3, dtype=torch.bfloat16, **where)
        model(batch(dtype=torch.bfloat16)).backward()
        parts = []
        for rank in range(3):
            plain.zero_grad()
            plain(batch(0, rank, torch.bfloat16)).backward()
            parts.append({name: p.grad.float() / 3 for name, p in plain.named_parameters()})
        for name, p in model.named_parameters():
            wanted = torch.stack([part[name.removeprefix("module.")] for part in parts]).sum(0)
            close(name, mfsdp_core.gather_full(p.grad), wanted, 1e-6)
    dist.barrier()
