"""Tensor parallelism beside sharding: torch's own, on a mesh axis of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from conformance.judging import same
from mfsdp_core import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard_model,
    gather_full,
)
from oracle.cycles import Twins, named
from oracle.ranks import WORLD
from oracle.sharded import STRATEGIES
from oracle.tensor_parallel import (
    VARIANTS,
    TpBlock,
    build_parallel,
    build_twin,
    tokens_of,
    tp_loss,
)

pytestmark = pytest.mark.on_ranks

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


def twins(shape: str, variant: str, inner: str, outer: str = "no_shard") -> Twins:
    root = root_mesh(shape)
    model = fully_shard_model(
        build_parallel(root["tp"], variant),
        fsdp_unit_modules=[TpBlock],
        zero_dp_strategy=inner,
        outer_dp_sharding_strategy=outer,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float64),
        sync_model_each_microbatch=False,
        **arguments(shape),
    )
    outer_size, inner_size, _ = SHAPES[shape]
    rank = root.get_local_rank("inner")
    rank += root.get_local_rank("outer") * inner_size if outer_size else 0
    ranks = max(outer_size, 1) * inner_size
    return Twins(model, build_twin(), tp_loss, tokens_of, rank, ranks)


@pytest.mark.parametrize(
    ("shape", "variant", "inner", "outer"),
    [
        *(("dp2_tp2", VARIANTS[i % 2], s, "no_shard") for i, s in enumerate(STRATEGIES)),
        *((one, "plain", s, "no_shard") for one in ("dp4_tp1", "tp2") for s in STRATEGIES[::3]),
        *(("outer2_tp2", "sequence", s, "no_shard") for s in ("no_shard", "optim_grads")),
        *(("outer2_tp2", "sequence", s, "optim") for s in STRATEGIES[1:]),
    ],
)
def test_gradients_beside_tensor_parallelism_equal_one_process(
    shape: str, variant: str, inner: str, outer: str
) -> None:
    twins(shape, variant, inner, outer).compare_gradients()


@pytest.mark.parametrize(
    ("shape", "variant", "inner", "outer", "options"),
    [
        ("dp2_tp2", "sequence", "no_shard", "no_shard", {"foreach": False}),
        ("dp2_tp2", "plain", "optim", "no_shard", {"foreach": False}),
        ("dp2_tp2", "sequence", "optim_grads_params", "no_shard", {"foreach": False}),
        ("outer2_tp2", "plain", "optim_grads_params", "optim", {"foreach": False}),
        # One mesh for all dense parameters.
        ("dp2_tp2", "plain", "optim_grads_params", "no_shard", {"foreach": True}),
    ],
)
def test_three_clipped_steps_beside_tensor_parallelism_equal_one_process(
    shape: str, variant: str, inner: str, outer: str, options: dict[str, bool]
) -> None:
    twins(shape, variant, inner, outer).compare_training(**options)


@pytest.mark.parametrize("inner", ["optim", "optim_grads_params"])
def test_modules_see_tensor_parallel_weights_while_they_run_and_shards_at_rest(inner: str) -> None:
    both = twins("dp2_tp2", "plain", inner)
    block = both.model.module.blocks[0]
    running: list[list[str]] = []

    def seen() -> list[str]:
        return [
            f"{type(p).__name__} {tuple(getattr(p, 'placements', ()))} {tuple(p.shape)}"
            for p in (block.norm.weight, block.up.weight, block.down.weight)
        ]

    block.down.register_forward_pre_hook(lambda *_: running.append(seen()))
    both.run(1, 0)
    wanted = [
        "Parameter () (6,)",
        "DTensor (Shard(dim=0),) (10, 6)",
        "DTensor (Shard(dim=1),) (6, 10)",
    ]
    same("running", running, [wanted])
    wanted = [
        "ShardedWeight (Shard(dim=0), Replicate()) (6,)",
        "ShardedWeight (_StridedShard(dim=0, sf=2), Shard(dim=0)) (10, 6)",
        "ShardedWeight (Shard(dim=0), Shard(dim=1)) (6, 10)",
    ]
    same("resting", seen(), wanted)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_placements_say_what_torch_means_by_them(outer: str, dim: int) -> None:
    """`full_tensor` is right where all rows divide."""
    shape = "outer2_tp2" if outer == "optim" else "dp2_tp2"
    root = root_mesh(shape)
    whole = torch.arange(96.0).view(16, 6)
    module = nn.Linear(6, 16, bias=False)
    module.weight = nn.Parameter(distribute_tensor(whole, root["tp"], [Shard(dim)]))
    fully_shard_model(
        module, zero_dp_strategy=3, outer_dp_sharding_strategy=outer, **arguments(shape)
    )
    assert module.weight.device_mesh.ndim == root.ndim - (root.mesh_dim_names[0] == "spare")
    same("whole", module.weight.full_tensor().detach(), whole)


@pytest.mark.parametrize(
    ("shape", "inner", "outer"),
    [
        *(("dp2_tp2", inner, "no_shard") for inner in STRATEGIES),
        ("outer2_tp2", "optim_grads_params", "no_shard"),
        ("outer2_tp2", "optim_grads_params", "optim"),
    ],
)
def test_torch_takes_whole_state_and_statistics_of_tensor_parallel_shards(
    shape: str, inner: str, outer: str
) -> None:
    model = twins(shape, "sequence", inner, outer).model
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    shards = dict(named(model))
    for name, value in build_twin().state_dict().items():
        same(name, found[f"module.{name}"], value)
        shard = shards[name].detach()
        assert torch.allclose(shard.mean().full_tensor(), value.mean()), name
        same(f"largest of {name}", shard.max().full_tensor(), value.max())


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("inner", ["no_shard", "optim_grads_params"])
def test_whole_tensors_and_tensor_parallel_ones_can_be_loaded(inner: str, is_whole: bool) -> None:
    """The latter are the DTensors of the model before sharding."""
    model = twins("dp2_tp2", "sequence", inner).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    source = build_twin() if is_whole else build_parallel(root_mesh("dp2_tp2")["tp"], "sequence")
    given = source.state_dict().items()
    model.load_state_dict({f"module.{key}": value for key, value in given})
    expected = build_twin().state_dict()
    for key, p in named(model):
        same(key, gather_full(p).detach(), expected[key])
    assert torch.allclose(model(tokens_of(0, 0)), build_twin()(tokens_of(0, 0)))


def test_parameters_cut_by_hand_count_once_and_gather_whole() -> None:
    """Linears that are cut without DTensors."""
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
    for kind in module:
        same(kind, gather_full(module[kind].weight).detach(), whole)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    norm = float(clip_grad_norm_(list(model.parameters()), float("inf")))
    assert norm / float(whole.norm()) == pytest.approx(3**0.5)
