"""Tensor parallelism beside sharding: torch's own, on a mesh axis of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mfsdp_core import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard_model,
    fully_shard_optimizer,
    gather_full,
)
from oracle.cycles import named, pieces_by_rank, run_cycle
from oracle.ranks import RankPool
from oracle.reference import Named, relative_difference
from oracle.sharded import STRATEGIES
from oracle.tensor_parallel import (
    VARIANTS,
    TpBlock,
    accumulate,
    build_parallel,
    build_twin,
    cut_dim,
    tokens_of,
    tp_loss,
)

pytestmark = pytest.mark.processes

WORLD = 4
#: (outer, inner, tensor); an outer size of 0 is a mesh without that axis.
SHAPES = {"dp2_tp2": (0, 2, 2), "dp4_tp1": (0, 4, 1), "outer2_tp2": (2, 1, 2), "tp2": (0, 1, 2)}


@cache
def root_mesh(shape: str) -> DeviceMesh:
    outer, inner, tensor = SHAPES[shape]
    spare = WORLD // (max(outer, 1) * inner * tensor)
    sizes, names = (spare, inner, tensor), ("spare", "inner", "tp")
    if outer:
        sizes, names = (outer, inner, tensor), ("outer", "inner", "tp")
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


@cache
def arguments(shape: str) -> dict[str, Any]:
    root = root_mesh(shape)
    given: dict[str, Any] = {"device_mesh": root, "dp_shard_dim": "inner", "tp_dim": "tp"}
    if "outer" in root.mesh_dim_names:
        given["dp_outer_dim"] = "outer"
        given["hybrid_fsdp_group"] = root["outer", "inner"]._flatten("both").get_group()
    return given


def sharded_tp(shape: str, variant: str, inner: str, outer: str = "no_shard", **more: Any) -> Any:
    more.setdefault("sync_model_each_microbatch", False)
    return fully_shard_model(
        build_parallel(root_mesh(shape)["tp"], variant),
        fsdp_unit_modules=[TpBlock],
        zero_dp_strategy=inner,
        outer_dp_sharding_strategy=outer,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float64),
        **arguments(shape),
        **more,
    )


def data_parallel(shape: str) -> tuple[int, int]:
    """Number of data-parallel ranks, and which one this is."""
    outer, inner, _ = SHAPES[shape]
    root = root_mesh(shape)
    own = root.get_local_rank("inner")
    return max(outer, 1) * inner, own + (root.get_local_rank("outer") * inner if outer else 0)


def microbatches_of(shape: str, count: int, cycle: int) -> list[Tensor]:
    return [tokens_of(data_parallel(shape)[1], j, cycle) for j in range(count)]


def joined(shape: str, inner: str, outer: str, shards: Named) -> Named:
    """Whole tensors: inner-major rows of each tensor-parallel rank, then those side by side."""
    pieces = pieces_by_rank(shards)
    root = root_mesh(shape)
    sizes = (1, *root.mesh.shape[-2:]) if root.mesh_dim_names[0] == "spare" else root.mesh.shape
    own = root.mesh[root.get_local_rank(0)] if root.mesh_dim_names[0] == "spare" else root.mesh
    coordinates = own.view(sizes)
    coordinates = coordinates if outer == "optim" else coordinates[:1]
    coordinates = coordinates if inner != "no_shard" else coordinates[:, :1]
    whole = {}
    for key in shards:
        columns = [
            torch.cat([pieces[rank][key] for rank in coordinates[:, :, t].T.flatten().tolist()])
            for t in range(coordinates.shape[2])
        ]
        dim = cut_dim(key)
        whole[key] = columns[0] if dim is None else torch.cat(columns, dim)
        if dim is None:
            assert all(torch.equal(column, columns[0]) for column in columns), key
    return whole


def gradient_errors(shape: str, variant: str, inner: str, outer: str) -> list[float]:
    """Largest relative error of a gradient for 1 to 3 microbatches, one cycle after another."""
    model = sharded_tp(shape, variant, inner, outer)
    errors = []
    for cycle, microbatches in enumerate((1, 2, 3)):
        run_cycle(model, tp_loss, microbatches_of(shape, microbatches, cycle))
        found = joined(shape, inner, outer, {key: p.grad for key, p in named(model)})
        twin = build_twin()
        accumulate(twin, data_parallel(shape)[0], microbatches, cycle)
        expected = {key: p.grad for key, p in twin.named_parameters()}
        errors.append(relative_difference(found, expected))
        model.zero_grad_buffer()
    return errors


def training_error(shape: str, variant: str, inner: str, outer: str, foreach: bool) -> float:
    """Of parameters, norms and gathered state after three clipped AdamW steps."""
    model = sharded_tp(shape, variant, inner, outer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
    fully_shard_optimizer(optimizer)
    twin = build_twin()
    reference = torch.optim.AdamW(twin.parameters(), lr=0.01)
    worst = 0.0
    for cycle in range(3):
        run_cycle(model, tp_loss, microbatches_of(shape, 2, cycle))
        norm = clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        accumulate(twin, data_parallel(shape)[0], 2, cycle)
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        worst = max(worst, abs(float(norm / expected) - 1))
        reference.step()
        reference.zero_grad()
    weights = dict(twin.named_parameters())
    found = joined(shape, inner, outer, {key: p.detach() for key, p in named(model)})
    for key, parameter in named(model):
        assert torch.equal(gather_full(parameter), found[key]), key
        moment = gather_full(optimizer.state[parameter]["exp_avg"])
        torch.testing.assert_close(moment, reference.state[weights[key]]["exp_avg"])
    return max(worst, relative_difference(found, {k: w.detach() for k, w in weights.items()}))


def faces(inner: str) -> dict[str, list[str]]:
    """What a unit's modules see while they run, and at rest, by placement."""
    model = sharded_tp("dp2_tp2", "plain", inner)
    block = model.module.blocks[0]
    seen: dict[str, list[str]] = {}

    def look(when: str) -> None:
        seen[when] = [
            f"{type(p).__name__} {tuple(getattr(p, 'placements', ()))} {tuple(p.shape)}"
            for p in (block.norm.weight, block.up.weight, block.down.weight)
        ]

    block.down.register_forward_pre_hook(lambda *_: look("running"))
    run_cycle(model, tp_loss, microbatches_of("dp2_tp2", 1, 0))
    look("resting")
    return seen


def torchs_own_gather(outer: str) -> bool:
    """Whether `full_tensor`, right where all rows divide, agrees with the labels of our shards."""
    shape = "outer2_tp2" if outer == "optim" else "dp2_tp2"
    root = root_mesh(shape)
    whole = torch.arange(96.0).view(16, 6)
    for dim in (0, 1):
        module = nn.Linear(6, 16, bias=False)
        module.weight = nn.Parameter(distribute_tensor(whole, root["tp"], [Shard(dim)]))
        fully_shard_model(
            module, zero_dp_strategy=3, outer_dp_sharding_strategy=outer, **arguments(shape)
        )
        assert module.weight.device_mesh.ndim == root.ndim - (root.mesh_dim_names[0] == "spare")
        if not torch.equal(module.weight.full_tensor(), whole):
            return False
    return True


def whole_state(shape: str, inner: str, outer: str) -> list[str]:
    """Names of which torch's own whole state, mean or largest value is not that of one process."""
    model = sharded_tp(shape, "sequence", inner, outer)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    expected = build_twin().state_dict()
    shards = dict(named(model))
    return [
        name
        for name, value in expected.items()
        if not torch.equal(found[f"module.{name}"], value)
        or not torch.allclose(shards[name].detach().mean().full_tensor(), value.mean())
        or not torch.equal(shards[name].detach().max().full_tensor(), value.max())
    ]


def loaded_whole_and_cut(inner: str) -> bool:
    """Loads whole tensors and, in another model, the DTensors of the model before sharding."""
    values = build_parallel(root_mesh("dp2_tp2")["tp"], "sequence").state_dict()
    good = True
    for whole in (True, False):
        model = sharded_tp("dp2_tp2", "sequence", inner)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().zero_()
        given = build_twin().state_dict() if whole else values
        model.load_state_dict({f"module.{key}": value for key, value in given.items()})
        expected = build_twin().state_dict()
        good &= all(torch.equal(gather_full(p), expected[key]) for key, p in named(model))
        output = model(tokens_of(0, 0))
        good &= torch.allclose(output, build_twin()(tokens_of(0, 0)))
    return good


def cut_by_hand() -> tuple[float, list[list[int]]]:
    """Norm of the weights of linears that are cut without DTensors, and their gathered shapes."""
    root = root_mesh("dp2_tp2")
    rank = root.get_local_rank("tp")
    whole = torch.arange(48.0).view(8, 6)
    module = nn.ModuleDict(
        {kind: nn.Linear(1, 1, bias=False) for kind in ("column", "row", "same")}
    )
    module["column"].weight = nn.Parameter(whole.chunk(2)[rank].clone())
    module["column"].weight.tensor_model_parallel = True
    module["column"].weight.partition_dim = 0
    module["row"].weight = nn.Parameter(whole.chunk(2, dim=1)[rank].clone())
    module["row"].weight._tensor_parallel_mode = "row"
    module["same"].weight = nn.Parameter(whole.clone())
    model = fully_shard_model(module, **arguments("dp2_tp2"))
    gathered = [gather_full(module[kind].weight) for kind in module]
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    norm = float(clip_grad_norm_(list(model.parameters()), float("inf")))
    assert all(torch.equal(value, whole) for value in gathered)
    return norm / float(whole.norm()), [list(value.shape) for value in gathered]


@pytest.mark.sample
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("inner", STRATEGIES)
def test_gradients_beside_tensor_parallelism_equal_one_process(
    ranks: RankPool, inner: str, variant: str
) -> None:
    for errors in ranks.run(gradient_errors, "dp2_tp2", variant, inner, "no_shard"):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("shape", ["dp4_tp1", "tp2"])
@pytest.mark.parametrize("inner", ["no_shard", "optim_grads_params"])
def test_axes_of_one_rank_behave_like_any_other(ranks: RankPool, inner: str, shape: str) -> None:
    for errors in ranks.run(gradient_errors, shape, "plain", inner, "no_shard"):
        assert max(errors) < 1e-12


@pytest.mark.parametrize(
    ("inner", "outer"),
    [("no_shard", "no_shard"), ("optim_grads", "no_shard")]
    + [(inner, "optim") for inner in STRATEGIES[1:]],
)
def test_gradients_of_hybrid_sharding_beside_tensor_parallelism_equal_one_process(
    ranks: RankPool, inner: str, outer: str
) -> None:
    for errors in ranks.run(gradient_errors, "outer2_tp2", "sequence", inner, outer):
        assert max(errors) < 1e-12


@pytest.mark.parametrize(
    ("shape", "variant", "inner", "outer"),
    [
        ("dp2_tp2", "sequence", "no_shard", "no_shard"),
        ("dp2_tp2", "plain", "optim", "no_shard"),
        ("dp2_tp2", "sequence", "optim_grads_params", "no_shard"),
        ("outer2_tp2", "plain", "optim_grads_params", "optim"),
    ],
)
def test_three_clipped_steps_beside_tensor_parallelism_equal_one_process(
    ranks: RankPool, shape: str, variant: str, inner: str, outer: str
) -> None:
    assert max(ranks.run(training_error, shape, variant, inner, outer, False)) < 1e-12


def test_one_mesh_for_all_dense_parameters_lets_foreach_optimizers_step(ranks: RankPool) -> None:
    errors = ranks.run(training_error, "dp2_tp2", "plain", "optim_grads_params", "no_shard", True)
    assert max(errors) < 1e-12


@pytest.mark.parametrize("inner", ["optim", "optim_grads_params"])
def test_modules_see_tensor_parallel_weights_while_they_run_and_shards_at_rest(
    ranks: RankPool, inner: str
) -> None:
    for seen in ranks.run(faces, inner):
        assert seen["running"] == [
            "Parameter () (6,)",
            "DTensor (Shard(dim=0),) (10, 6)",
            "DTensor (Shard(dim=1),) (6, 10)",
        ]
        assert seen["resting"] == [
            "ShardedWeight (Shard(dim=0), Replicate()) (6,)",
            "ShardedWeight (_StridedShard(dim=0, sf=2), Shard(dim=0)) (10, 6)",
            "ShardedWeight (Shard(dim=0), Shard(dim=1)) (6, 10)",
        ]


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_placements_say_what_torch_means_by_them(ranks: RankPool, outer: str) -> None:
    assert ranks.run(torchs_own_gather, outer) == [True] * WORLD


@pytest.mark.parametrize(
    ("shape", "inner", "outer"),
    [
        *(("dp2_tp2", inner, "no_shard") for inner in STRATEGIES),
        ("outer2_tp2", "optim_grads_params", "no_shard"),
        ("outer2_tp2", "optim_grads_params", "optim"),
    ],
)
def test_torch_takes_whole_state_and_statistics_of_tensor_parallel_shards(
    ranks: RankPool, shape: str, inner: str, outer: str
) -> None:
    assert ranks.run(whole_state, shape, inner, outer) == [[]] * WORLD


@pytest.mark.parametrize("inner", ["no_shard", "optim_grads_params"])
def test_whole_tensors_and_tensor_parallel_ones_can_be_loaded(ranks: RankPool, inner: str) -> None:
    assert ranks.run(loaded_whole_and_cut, inner) == [True] * WORLD


def test_parameters_cut_by_hand_count_once_and_gather_whole(ranks: RankPool) -> None:
    for norm, shapes in ranks.run(cut_by_hand):
        assert norm == pytest.approx(3**0.5)
        assert shapes == [[8, 6]] * 3
