"""Experts shard over a mesh of their own and are divided by the dense data-parallel size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_core import MixedPrecisionPolicy, clip_grad_norm_, fully_shard_model
from oracle.beside_torch import Pair, fail_and_load
from oracle.experts import MoeLayer, build_moe, tokens_of
from oracle.ranks import mesh

pytestmark = pytest.mark.on_ranks


@dataclass(frozen=True)
class Cut:
    """A way to cut the world. expert_shape: (outer, inner, ep), or by names where they differ."""

    dense_ranks: int
    dense_shape: tuple[int, ...]
    dense_names: tuple[str, ...]
    expert_shape: tuple[int, ...]
    expert_names: tuple[str, ...]

    @property
    def is_hybrid(self) -> bool:
        return "outer" in self.dense_names


CUTS = {
    "ep2": Cut(4, (4,), ("inner",), (2, 2), ("inner", "ep")),
    # Every expert lives on one rank: groups of one scale and land like any other (R3).
    "ep4": Cut(4, (4,), ("inner",), (1, 4), ("inner", "ep")),
    # Two independent halves of the world.
    "ep2_of_2": Cut(2, (2, 2), ("replica", "inner"), (2, 1, 2), ("replica", "inner", "ep")),
    # Dense outer groups are {0, 2} and {1, 3}; of experts, {0, 1} and {2, 3}.
    "hybrid": Cut(4, (2, 2), ("outer", "inner"), (2, 2, 1), ("ep", "outer", "inner")),
    "hybrid_of_1": Cut(4, (2, 2), ("outer", "inner"), (1, 2, 2), ("outer", "inner", "ep")),
}


@cache
def meshes(name: str) -> tuple[DeviceMesh, DeviceMesh]:
    cut = CUTS[name]
    dense = init_device_mesh("cpu", cut.dense_shape, mesh_dim_names=cut.dense_names)
    experts = init_device_mesh("cpu", cut.expert_shape, mesh_dim_names=cut.expert_names)
    return dense, experts


@cache
def arguments(name: str) -> dict[str, Any]:
    dense, experts = meshes(name)
    given: dict[str, Any] = {
        "device_mesh": dense,
        "expt_device_mesh": experts,
        "dp_shard_dim": "inner",
    }
    if CUTS[name].is_hybrid:
        given["dp_outer_dim"] = "outer"
        given["hybrid_fsdp_group"] = dense["outer", "inner"]._flatten().get_group()
        given["hybrid_fsdp_expt_group"] = experts["outer", "inner"]._flatten().get_group()
    return given


def pair(name: str, inner: str, outer: str = "no_shard", **more: Any) -> Pair:
    more.setdefault("sync_model_each_microbatch", False)
    model = fully_shard_model(
        build_moe(meshes(name)[1]["ep"].get_group()),
        fsdp_unit_modules=[MoeLayer],
        zero_dp_strategy=inner,
        outer_dp_sharding_strategy=outer,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float64),
        **arguments(name),
        **more,
    )
    return Pair(build_moe(), model, dist.group.WORLD)


def own_tokens(name: str, microbatch: int, cycle: int) -> Tensor:
    """Of this data-parallel rank."""
    return tokens_of(dist.get_rank() % CUTS[name].dense_ranks, microbatch, cycle)


@pytest.mark.parametrize(
    ("name", "inner", "outer"),
    [
        ("ep2", "no_shard", "no_shard"),
        ("ep4", "optim_grads_params", "no_shard"),
        ("ep2_of_2", "optim", "no_shard"),
        ("hybrid", "optim_grads_params", "optim"),
        ("hybrid_of_1", "optim_grads", "no_shard"),
    ],
)
def test_experts_get_the_mean_over_all_ranks_that_sent_them_tokens(
    name: str, inner: str, outer: str
) -> None:
    """Clipped steps equal those of one process that has them all.

    On two axes both stages use the experts' own groups.
    """
    both = pair(name, inner, outer)
    both.compare_training(partial(own_tokens, name))
    if outer == "optim":
        seen = {(r.operation, r.group, r.group_size) for r in both.model.wire_log}
        assert {one for one in seen if "outer" in one[1]} == {
            (op, group, 2)
            for op in ("reduce_scatter", "all_gather")
            for group in ("outer", "expert_outer")
        }


@pytest.mark.parametrize(
    ("name", "inner", "outer", "switch", "times"),
    [
        ("ep2", "optim", "no_shard", "average_in_collective", 1),
        ("hybrid", "optim", "optim", "average_in_collective", 1),
        ("ep4", "optim_grads", "no_shard", "calculate_per_token_loss", 4),
    ],
)
def test_the_divisor_holds_for_means_in_collectives_and_is_absent_per_token(
    name: str, inner: str, outer: str, switch: str, times: float
) -> None:
    both = pair(name, inner, outer, **{switch: True})
    both.backward(own_tokens(name, 0, 0), own_tokens(name, 1, 0))
    both.compare_gradients(times=times)


def test_a_parameter_marked_as_not_shared_is_an_experts() -> None:
    """Beside one that is not marked."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight.allreduce = False
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    wrapped = fully_shard_model(
        model, device_mesh=mesh(4), dp_shard_dim="dp", expt_device_mesh=experts
    )
    wrapped(torch.ones(2, 4)).sum().backward()
    assert wrapped.module[0].weight.allreduce is False
    assert {(r.group, r.group_size) for r in wrapped.wire_log} == {
        ("expert_inner", 2),
        ("inner", 4),
    }


def test_gathers_of_experts_may_have_a_group_of_their_own() -> None:
    groups = {sharers: dist.new_group(list(sharers)) for sharers in ((0, 2), (1, 3))}
    own = groups[tuple(meshes("ep2")[1]["inner"].mesh.tolist())]
    both = pair("ep2", "optim_grads_params", expt_fsdp_group_ag=own)
    both.backward(own_tokens("ep2", 0, 0))
    both.compare_gradients()


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_the_norm_counts_experts_and_tensor_parallel_parts_once(strategy: str) -> None:
    """Two dense ranks times two tensor-parallel ones; two ranks share each of two experts.

    The gradient of everything dense is 1, of expert e it is e + 1; which rank has which is up to
    the mesh of experts, which has no tensor-parallel dimension.
    """
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    module = nn.ModuleDict(
        {kind: nn.Linear(3, 4, bias=False) for kind in ("expert", "cut", "whole")}
    )
    module["expert"].weight.allreduce = False
    module["cut"].weight.tensor_model_parallel = True
    module["cut"].weight.partition_dim = 0
    model = fully_shard_model(
        module,
        device_mesh=root,
        dp_shard_dim="dp",
        tp_dim="tp",
        expt_device_mesh=experts,
        zero_dp_strategy=strategy,
    )
    own = experts.get_local_rank("ep") + 1.0
    for kind in module:
        weight = module[kind].weight
        weight.grad = torch.full_like(weight, own if kind == "expert" else 1.0).detach()
    # 12 elements each, of the cut one twice as many.
    expected = (12 * (1 + 4) + 24 + 12) ** 0.5
    norm = float(clip_grad_norm_(list(model.parameters()), float("inf")))
    assert abs(norm / expected - 1) < 1e-6, norm


@pytest.mark.parametrize(
    ("name", "inner", "outer"),
    [
        ("ep2", "optim", "no_shard"),
        ("hybrid", "optim_grads_params", "optim"),
        ("hybrid_of_1", "optim_grads", "optim"),
    ],
)
def test_the_ledger_counts_a_bucket_over_the_ranks_that_share_it(
    name: str, inner: str, outer: str
) -> None:
    """After one cycle: weights in FP64, whole ones of the root besides; no gradients."""
    both = pair(name, inner, outer)
    both.backward(own_tokens(name, 0, 0))
    both.model.zero_grad_buffer()
    wanted = 0
    for bucket in both.model.buckets():
        sharers = meshes(name)[".experts." in bucket.parameters[0]]["inner"].size()
        comes_and_goes = inner == "optim_grads_params"
        wanted += 8 * bucket.elements // (sharers if comes_and_goes else 1)
        wanted += 8 * bucket.elements * (comes_and_goes and not bucket.unit)
    booked = both.model.ledger.bytes_by_category()
    assert sum(booked.values()) == wanted, (booked, wanted)


@pytest.mark.parametrize("inner", ["optim", "optim_grads_params"])
def test_experts_train_on_after_passes_that_fail_and_a_load(inner: str) -> None:
    both = pair("ep2", inner)
    fail_and_load(both.model, own_tokens("ep2", 0, 7))
    both.compare_training(partial(own_tokens, "ep2"))
