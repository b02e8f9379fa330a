"""Tensor parallelism beside sharding: torch's own, on a mesh axis of its own."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import Shard, distribute_tensor

from conformance.judging import same
from mfsdp_core import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard_model,
    fully_shard_optimizer,
    gather_full,
    load_checkpoint,
    save_checkpoint,
)
from oracle.beside_torch import Pair, fail_and_load
from oracle.checkpoints import different, whole
from oracle.cycles import named
from oracle.meshes import Shape
from oracle.models import loss
from oracle.ranks import mesh
from oracle.tensor_parallel import TpBlock, build_parallel, build_twin, tokens_of

pytestmark = pytest.mark.on_ranks

DIMS = ("spare", "inner", "tp")
SHAPES = {
    "dp2_tp2": Shape((1, 2, 2), DIMS, "inner", tensor="tp"),
    "dp4_tp1": Shape((1, 4, 1), DIMS, "inner", tensor="tp"),
    "outer2_tp2": Shape((2, 1, 2), ("outer", *DIMS[1:]), "inner", outer="outer", tensor="tp"),
    "tp2": Shape((2, 1, 2), DIMS, "inner", tensor="tp"),
}
TP = SHAPES["dp2_tp2"]


def pair(shape: str, variant: str, inner: str, outer: str = "no_shard") -> Pair:
    root = SHAPES[shape].root()
    model = fully_shard_model(
        build_parallel(root["tp"], variant),
        fsdp_unit_modules=[TpBlock],
        zero_dp_strategy=inner,
        outer_dp_sharding_strategy=outer,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float64),
        sync_model_each_microbatch=False,
        **SHAPES[shape].arguments(),
    )
    return Pair(build_twin(), model, dist.group.WORLD)


def own_batch(shape: str, microbatch: int, cycle: int) -> Tensor:
    """Of this data-parallel rank."""
    return tokens_of(SHAPES[shape].data_rank(), microbatch, cycle)


@pytest.mark.parametrize(
    ("shape", "variant", "inner", "outer", "options"),
    [
        ("dp2_tp2", "sequence", "no_shard", "no_shard", {"foreach": False}),
        ("dp2_tp2", "plain", "optim", "no_shard", {"foreach": False}),
        ("dp2_tp2", "sequence", "optim_grads", "no_shard", {"foreach": False}),
        # One mesh for all dense parameters.
        ("dp2_tp2", "plain", "optim_grads_params", "no_shard", {"foreach": True}),
        ("dp4_tp1", "plain", "optim_grads_params", "no_shard", {"foreach": False}),
        ("tp2", "plain", "optim_grads_params", "no_shard", {"foreach": False}),
        ("outer2_tp2", "sequence", "no_shard", "no_shard", {"foreach": False}),
        ("outer2_tp2", "sequence", "optim_grads_params", "optim", {"foreach": False}),
    ],
)
def test_clipped_steps_and_gradients_beside_tensor_parallelism_equal_one_process(
    shape: str, variant: str, inner: str, outer: str, options: dict[str, bool]
) -> None:
    pair(shape, variant, inner, outer).compare_training(partial(own_batch, shape), **options)


@pytest.mark.parametrize("inner", ["optim", "optim_grads_params"])
def test_modules_see_tensor_parallel_weights_while_they_run_and_shards_at_rest(inner: str) -> None:
    model = pair("dp2_tp2", "plain", inner).model
    block = model.module.blocks[0]
    running: list[list[str]] = []

    def seen() -> list[str]:
        return [
            f"{type(p).__name__} {tuple(getattr(p, 'placements', ()))} {tuple(p.shape)}"
            for p in (block.norm.weight, block.up.weight, block.down.weight)
        ]

    block.down.register_forward_pre_hook(lambda *_: running.append(seen()))
    model(tokens_of(0, 0))
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
    root = SHAPES[shape].root()
    whole = torch.arange(96.0).view(16, 6)
    module = nn.Linear(6, 16, bias=False)
    module.weight = nn.Parameter(distribute_tensor(whole, root["tp"], [Shard(dim)]))
    fully_shard_model(
        module, zero_dp_strategy=3, outer_dp_sharding_strategy=outer, **SHAPES[shape].arguments()
    )
    assert module.weight.device_mesh.ndim == root.ndim - (root.mesh_dim_names[0] == "spare")
    same("whole", module.weight.full_tensor().detach(), whole)


@pytest.mark.parametrize(
    ("shape", "inner", "outer"),
    [
        *(("dp2_tp2", inner, "no_shard") for inner in ("no_shard", "optim_grads_params")),
        ("outer2_tp2", "optim_grads_params", "optim"),
    ],
)
def test_torch_takes_whole_state_and_statistics_of_tensor_parallel_shards(
    shape: str, inner: str, outer: str
) -> None:
    model = pair(shape, "sequence", inner, outer).model
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    shards = dict(named(model))
    for name, value in build_twin().state_dict().items():
        same(name, found[f"module.{name}"], value)
        shard = shards[name].detach()
        assert torch.allclose(shard.sum().full_tensor(), value.sum()), name
        assert torch.allclose(shard.norm().full_tensor(), value.norm()), name


@pytest.mark.parametrize(("inner", "is_whole"), [("no_shard", False), ("optim_grads_params", True)])
def test_whole_tensors_and_tensor_parallel_ones_can_be_loaded(inner: str, is_whole: bool) -> None:
    """The latter are the DTensors of the model before sharding."""
    model = pair("dp2_tp2", "sequence", inner).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    source = build_twin() if is_whole else build_parallel(TP.root()["tp"], "sequence")
    given = source.state_dict().items()
    model.load_state_dict({f"module.{key}": value for key, value in given})
    expected = build_twin().state_dict()
    for key, p in named(model):
        same(key, gather_full(p).detach(), expected[key])
    assert torch.allclose(model(tokens_of(0, 0)), build_twin()(tokens_of(0, 0)))


def test_parameters_cut_by_hand_count_once_and_gather_whole() -> None:
    """Linears that are cut without DTensors."""
    root = TP.root()
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
    model = fully_shard_model(module, **TP.arguments())
    for kind in module:
        same(kind, gather_full(module[kind].weight).detach(), whole)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    norm = float(clip_grad_norm_(list(model.parameters()), float("inf")))
    assert norm / float(whole.norm()) == pytest.approx(3**0.5)


def test_r15_checkpoints_cross_tensor_parallelism(tmp_path: Path) -> None:
    """Saved with tensor parallelism, loaded without, saved, loaded with."""
    trained = []
    for seed, shape in enumerate(("dp2_tp2", "", "dp2_tp2")):
        where = (
            SHAPES[shape].arguments() if shape else {"device_mesh": mesh(4), "dp_shard_dim": "dp"}
        )
        axis = where["device_mesh"]["tp"] if shape else None
        model: Any = fully_shard_model(
            build_twin() if axis is None else build_parallel(axis, "sequence"),
            fsdp_unit_modules=[TpBlock],
            mixed_precision_policy=MixedPrecisionPolicy(torch.float64),
            **where,
        )
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        loss(model(tokens_of(0, seed))).backward()
        optimizer.step()
        optimizer.zero_grad()
        trained.append((model, optimizer))
    expected = whole(*trained[0])
    for source, target in pairwise(trained):
        folder = tmp_path / str(trained.index(source))
        save_checkpoint(folder, *source)
        load_checkpoint(folder, *target)
        assert different(whole(*target), expected) == []


@pytest.mark.parametrize("inner", ["optim", "optim_grads_params"])
def test_tensor_parallel_shards_train_on_after_passes_that_fail_and_a_load(inner: str) -> None:
    both = pair("dp2_tp2", "sequence", inner)
    fail_and_load(both.model, own_batch("dp2_tp2", 0, 7))
    both.compare_training(partial(own_batch, "dp2_tp2"))
