"""Experts shard over a mesh of their own and are divided by the dense data-parallel size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_core import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard_model,
    fully_shard_optimizer,
    gather_full,
)
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.grouping import ParameterFacts
from mfsdp_core.plan.memory_model import PolicyNames, memory_at_rest
from mfsdp_core.plan.strategy import parse_strategy
from oracle.cycles import named, pieces_by_rank, run_cycle
from oracle.experts import MoeLayer, accumulate, build_moe, moe_loss, tokens_of
from oracle.ranks import RankPool, mesh
from oracle.reference import Named, relative_difference
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.processes

WORLD = 4


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


def sharded_moe(name: str, inner: str, outer: str = "no_shard", **more: Any) -> Any:
    more.setdefault("sync_model_each_microbatch", False)
    return fully_shard_model(
        build_moe(meshes(name)[1]["ep"].get_group()),
        fsdp_unit_modules=[MoeLayer],
        zero_dp_strategy=inner,
        outer_dp_sharding_strategy=outer,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float64),
        **arguments(name),
        **more,
    )


def place_on(axes: DeviceMesh, name: str) -> Coordinate:
    outer = (axes.get_local_rank("outer"), axes["outer"].size()) if CUTS[name].is_hybrid else (0, 1)
    return Coordinate(axes.get_local_rank("inner"), axes["inner"].size(), *outer)


def ledger_and_model(name: str, inner: str, outer: str) -> list[dict[str, int]]:
    """Bytes by category after one cycle, as booked and as the model of memory has them."""
    model = sharded_moe(name, inner, outer)
    bare = build_moe(meshes(name)[1]["ep"].get_group())
    units = [key for key, module in bare.named_modules() if isinstance(module, MoeLayer)]
    facts = [
        ParameterFacts(
            (key,),
            (next((unit for unit in units if key.startswith(f"{unit}.")), ""),),
            tuple(parameter.shape),
            "float64",
            requires_grad=True,
            is_expert=".experts." in key,
        )
        for key, parameter in bare.named_parameters()
    ]
    run_cycle(model, moe_loss, microbatches_of(name, 1, 0))
    model.zero_grad_buffer()
    dense, experts = (place_on(axes, name) for axes in meshes(name))
    expected = memory_at_rest(
        facts,
        parse_strategy(inner, outer),
        dense,
        PolicyNames("float64"),
        expert_coordinate=experts,
    )
    return [model.ledger.bytes_by_category(), expected.bytes_by_category()]


def own_rank(name: str) -> int:
    return dist.get_rank() % CUTS[name].dense_ranks


def microbatches_of(name: str, count: int, cycle: int) -> list[Tensor]:
    return [tokens_of(own_rank(name), j, cycle) for j in range(count)]


def joined(name: str, inner: str, outer: str, shards: Named) -> Named:
    """Whole tensors from pieces in the order of the specification; not the core's own gather."""
    pieces = pieces_by_rank(shards)
    orders = [piece_order(of_kind, name, inner, outer) for of_kind in meshes(name)]
    return {
        key: torch.cat([pieces[rank][key] for rank in orders[".experts." in key]]) for key in shards
    }


def piece_order(axes: DeviceMesh, name: str, inner: str, outer: str) -> list[int]:
    """Ranks whose pieces make up a whole tensor: inner-major, one of them where it is whole."""
    if inner == "no_shard":
        return [dist.get_rank()]
    if outer == "no_shard" or not CUTS[name].is_hybrid:
        return axes["inner"].mesh.tolist()
    return axes["outer", "inner"].mesh.T.flatten().tolist()


def twin_gradient(name: str, microbatches: int, cycle: int, divisor: float | None = None) -> Named:
    twin, ranks = build_moe(), CUTS[name].dense_ranks
    accumulate(twin, range(ranks), microbatches, cycle, divisor or ranks)
    return {key: p.grad for key, p in twin.named_parameters()}


def gradient_errors(name: str, inner: str, outer: str, more: dict[str, Any]) -> list[float]:
    """Largest relative error of a gradient for 1 to 3 microbatches, one cycle after another."""
    model = sharded_moe(name, inner, outer, **more)
    divisor = 1.0 if more.get("calculate_per_token_loss") else None
    errors = []
    for cycle, microbatches in enumerate((1, 2, 3)):
        run_cycle(model, moe_loss, microbatches_of(name, microbatches, cycle))
        found = joined(name, inner, outer, {key: p.grad for key, p in named(model)})
        expected = twin_gradient(name, microbatches, cycle, divisor)
        errors.append(relative_difference(found, {key: expected[key] for key in found}))
        model.zero_grad_buffer()
    return errors


def training_error(name: str, inner: str, outer: str) -> float:
    """Parameters and norms after three clipped AdamW steps, of which each clips."""
    model = sharded_moe(name, inner, outer)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    twin, ranks = build_moe(), CUTS[name].dense_ranks
    reference = torch.optim.AdamW(twin.parameters(), lr=0.01)
    worst = 0.0
    for cycle in range(3):
        run_cycle(model, moe_loss, microbatches_of(name, 2, cycle))
        norm = clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        accumulate(twin, range(ranks), 2, cycle, ranks)
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        worst = max(worst, abs(float(norm / expected) - 1))
        reference.step()
        reference.zero_grad()
    weights = dict(twin.named_parameters())
    found = joined(name, inner, outer, {key: p.detach() for key, p in named(model)})
    gathered = {key: gather_full(p) for key, p in named(model)}
    assert all(torch.equal(gathered[key], found[key]) for key in found)
    return max(worst, relative_difference(found, {key: weights[key].detach() for key in found}))


def groups_on_the_wire(name: str, outer: str) -> set[tuple[str, str, int]]:
    """Operation, role and size of every group that carried something."""
    model = sharded_moe(name, "optim_grads_params", outer)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for cycle in range(2):
        run_cycle(model, moe_loss, microbatches_of(name, 1, cycle))
        optimizer.step()
        optimizer.zero_grad()
    return {(r.operation, r.group, r.group_size) for r in model.wire_log}


def marked_by_attribute() -> list[str]:
    """Roles of the buckets of a module whose parameter is marked, and of one that is not."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight.allreduce = False
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    wrapped = fully_shard_model(
        model, device_mesh=mesh(4), dp_shard_dim="dp", expt_device_mesh=experts
    )
    wrapped(torch.ones(2, 4)).sum().backward()
    assert wrapped.module[0].weight.allreduce is False
    return sorted({f"{r.group} {r.group_size}" for r in wrapped.wire_log})


def separate_gather_group(name: str) -> float:
    groups = {sharers: dist.new_group(list(sharers)) for sharers in ((0, 2), (1, 3))}
    own = groups[tuple(meshes(name)[1]["inner"].mesh.tolist())]
    return max(gradient_errors(name, "optim_grads_params", "no_shard", {"expt_fsdp_group_ag": own}))


def norm_beside_tensor_parallelism(strategy: str) -> float:
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
    return float(clip_grad_norm_(list(model.parameters()), float("inf"))) / expected - 1


@pytest.mark.sample
@pytest.mark.parametrize("inner", STRATEGIES)
@pytest.mark.parametrize("name", ["ep2", "ep4", "ep2_of_2"])
def test_experts_get_the_mean_over_all_ranks_that_sent_them_tokens(
    ranks: RankPool, name: str, inner: str
) -> None:
    for errors in ranks.run(gradient_errors, name, inner, "no_shard", {}):
        assert max(errors) < 1e-12


@pytest.mark.sample
@pytest.mark.parametrize("name", ["hybrid", "hybrid_of_1"])
@pytest.mark.parametrize(
    ("inner", "outer"),
    [(s, "no_shard") for s in STRATEGIES] + [(s, "optim") for s in STRATEGIES[1:]],
)
def test_both_stages_of_hybrid_sharding_use_the_experts_own_groups(
    ranks: RankPool, name: str, inner: str, outer: str
) -> None:
    for errors in ranks.run(gradient_errors, name, inner, outer, {}):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("switch", ["average_in_collective", "calculate_per_token_loss"])
@pytest.mark.parametrize(
    ("name", "inner", "outer"),
    [
        ("ep2", "optim", "no_shard"),
        ("ep4", "optim_grads", "no_shard"),
        ("hybrid", "optim", "optim"),
    ],
)
def test_the_divisor_holds_for_means_in_collectives_and_is_absent_per_token(
    ranks: RankPool, name: str, inner: str, outer: str, switch: str
) -> None:
    for errors in ranks.run(gradient_errors, name, inner, outer, {switch: True}):
        assert max(errors) < 1e-12


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
def test_three_clipped_steps_with_experts_equal_one_process_that_has_them_all(
    ranks: RankPool, name: str, inner: str, outer: str
) -> None:
    assert max(ranks.run(training_error, name, inner, outer)) < 1e-12


def test_the_wire_log_names_the_groups_of_experts(ranks: RankPool) -> None:
    for seen in ranks.run(groups_on_the_wire, "ep2", "no_shard"):
        assert {(group, size) for _, group, size in seen} == {("inner", 4), ("expert_inner", 2)}
    for seen in ranks.run(groups_on_the_wire, "hybrid", "optim"):
        assert {(op, group, size) for op, group, size in seen if "outer" in group} == {
            (op, group, 2)
            for op in ("reduce_scatter", "all_gather")
            for group in ("outer", "expert_outer")
        }


def test_a_parameter_marked_as_not_shared_is_an_experts(ranks: RankPool) -> None:
    assert ranks.run(marked_by_attribute) == [["expert_inner 2", "inner 4"]] * WORLD


def test_gathers_of_experts_may_have_a_group_of_their_own(ranks: RankPool) -> None:
    assert max(ranks.run(separate_gather_group, "ep2")) < 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_norm_counts_experts_and_tensor_parallel_parts_once(
    ranks: RankPool, strategy: str
) -> None:
    assert max(map(abs, ranks.run(norm_beside_tensor_parallelism, strategy))) < 1e-6


@pytest.mark.parametrize(
    ("name", "outer"), [("ep2", "no_shard"), ("hybrid", "optim"), ("hybrid_of_1", "optim")]
)
@pytest.mark.parametrize("inner", STRATEGIES[1:])
def test_the_ledger_of_a_model_with_experts_equals_the_model_of_memory(
    ranks: RankPool, name: str, inner: str, outer: str
) -> None:
    for booked, expected in ranks.run(ledger_and_model, name, inner, outer):
        assert booked == expected
