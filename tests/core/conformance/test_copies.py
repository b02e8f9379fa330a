"""Weights that leave the model: files, copies and DTensors, whole and right, or refused."""

from __future__ import annotations

import copy
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel

import mfsdp_core
from conformance.judging import close, refuses, same
from conformance.small_model import (
    PREFIX,
    Stateful,
    batch,
    compare_weights,
    on_first,
    pair,
    reread,
    whole_weights,
)
from mfsdp_core.errors import (
    CapabilityNotBuiltError,
    CheckpointError,
    ConfigurationError,
    LayoutError,
    LifecycleError,
    StateDictError,
)
from mfsdp_core.uneven_dtensor import (
    gather_and_compute_chunk_metadata,
    gather_uneven_dtensor_to_full_tensor,
    make_fsdp_dtensor,
    preprocess_state_dict_for_uneven_dtensor,
    split_dtensor,
    uneven_dtensor_to_full_tensor,
    validate_uneven_dtensor,
)

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]


def test_weights_go_out_whole_and_come_in_again(tmp_path: Path) -> None:
    """State dicts and safetensors files, in one and in several, cast and not, tied names."""
    for strategy in (0, 3):
        model, plain = pair(strategy, Stateful)
        wanted = {n: v for n, v in plain.state_dict().items() if isinstance(v, Tensor)}
        exported = mfsdp_core.export_state_dict(model)
        tensors = {n: v for n, v in exported.items() if isinstance(v, Tensor)}
        first = dist.get_rank() == 0
        same("names", sorted(tensors), sorted(wanted) if first else [])
        for name, value in tensors.items():
            same(name, value.reshape(wanted[name].shape), wanted[name])
        kept = model.module.shift.clone()
        for value in tensors.values():
            value.add_(1)
        same("a buffer whose export was changed", model.module.shift, kept)
        compare_weights(model, plain, 1e-15)
        half = mfsdp_core.export_state_dict(model, dtype=torch.bfloat16)
        for name, value in ((n, v) for n, v in half.items() if isinstance(v, Tensor)):
            is_cast = wanted[name].is_floating_point()
            same(f"cast {name}", value.dtype, torch.bfloat16 if is_cast else wanted[name].dtype)
        folder = tmp_path / str(strategy)
        on_first(folder.mkdir)
        save, load = mfsdp_core.save_safetensors, mfsdp_core.load_safetensors
        save(folder / "one", model)
        save(folder / "half", model, dtype=torch.bfloat16)
        for _ in range(2):
            save(folder / "many", model, max_file_bytes=300, overwrite=True)
        refuses(CheckpointError, "exists. Choose", save, folder / "one", model)
        one = safetensors.torch.load_file(folder / "one" / "model.safetensors")
        same("stored", sorted(one), sorted(n for n in wanted if n != "units.1.up.weight"))
        for name, value in one.items():
            same(name, value.reshape(wanted[name].shape), wanted[name])
        files = sorted(folder.glob("many/*.safetensors"))
        assert len(files) > 1, "expected several files"
        index = json.loads((folder / "many" / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            held = safetensors.torch.load_file(folder / "many" / file)
            same(name, held[name].reshape(wanted[name].shape), wanted[name])
        _hold_at_most(300, files)
        total = sum(file.stat().st_size for file in files)
        same("total", index["metadata"]["total_size"], total)
        dist.barrier()
        for path, exact in (
            ("one", True),
            ("many", True),
            ("half", False),
            ("one/model.safetensors", True),
        ):
            with torch.no_grad():
                for p in model.parameters():
                    p.detach().fill_(9)
            load(folder / path, model)
            compare_weights(model, plain, 1e-15 if exact else 1e-2)
            close(
                "loss",
                model(batch()).detach(),
                plain(batch()).detach(),
                1e-11 if exact else 1e-1,
            )
        _refused_files(folder, model, one)
        same("nothing was changed", len(whole_weights(model)), len(list(plain.parameters())))


def test_a_missing_package_is_named() -> None:
    model, _ = pair(3)
    absent: dict[str, Any] = {name: None for name in sys.modules if "safetensors" in name}
    words = "need the package safetensors, which is not installed"
    with patch.dict(sys.modules, absent | {"safetensors": None}):
        refuses(CheckpointError, words, mfsdp_core.save_safetensors, Path("files"), model)


def _hold_at_most(count_bytes: int, files: list[Path]) -> None:
    for file in files:
        held = list(safetensors.torch.load_file(file).values())
        fits = sum(value.nbytes for value in held) <= count_bytes
        same(f"{file.name} is small, or one tensor", fits or len(held) == 1, True)


def _refused_files(folder: Path, model: Any, one: dict[str, Tensor]) -> None:
    def written(name: str, *parts: dict[str, Tensor]) -> Path:
        def write() -> None:
            (folder / name).mkdir()
            for number, part in enumerate(parts):
                safetensors.torch.save_file(part, folder / name / f"{number}.safetensors")

        on_first(write)
        return folder / name

    load = mfsdp_core.load_safetensors
    last = {"scale": one["scale"]}
    rest = {n: v for n, v in one.items() if n != "scale"}
    for error, words, path in (
        (CheckpointError, "expected a .safetensors file", folder / "none"),
        (CheckpointError, "expected a .safetensors file", written("empty")),
        (StateDictError, "Missing from the files: ['scale']", written("less", rest)),
        (
            StateDictError,
            "Unexpected there: ['more']",
            written("more", one | {"more": torch.ones(1)}),
        ),
        (StateDictError, "the files (2,)", written("shape", rest | {"scale": torch.ones(2)})),
        (CheckpointError, "scale is in two files", written("twice", one, last)),
    ):
        refuses(error, words, load, path, model)
    index = {"weight_map": {"scale": "lost.safetensors"}}
    path = written("lost", one)
    on_first(lambda: (path / "model.safetensors.index.json").write_text(json.dumps(index)))
    refuses(CheckpointError, "not there", lambda: load(path, model))
    aliased = {("units.1.up.weight" if n == "units.0.up.weight" else n): v for n, v in one.items()}
    load(written("plain", one | {"gain": one["gain"].reshape(())}), model)
    load(written("alias", aliased), model)
    compare_weights(model, _plain_of(one), 1e-15)


def _plain_of(one: dict[str, Tensor]) -> nn.Module:
    _, plain = pair(0, Stateful)
    plain.load_state_dict({"units.1.up.weight": one["units.0.up.weight"], **one}, strict=False)
    return plain


def test_copies_hold_shards_and_do_not_compute() -> None:
    """Of a module, of a unit, of a copy; averages; shards that are pickled."""
    for strategy, dtype in ((0, torch.float64), (3, torch.float64), (3, torch.bfloat16)):
        policy = mfsdp_core.MixedPrecisionPolicy(None if dtype.itemsize > 2 else torch.float32)
        model, plain = pair(strategy, Stateful, dtype, mixed_precision_policy=policy)
        optimizer = mfsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        once = copy.deepcopy(model.module)
        x = batch(dtype=dtype)
        averaged = AveragedModel(model.module)
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model.module)
        first = dict(plain.named_parameters())
        for again in (once, copy.deepcopy(once)):
            refuses(LifecycleError, "does not compute", again, x)
            for name, p in again.named_parameters():
                same(f"{name} is a shard", isinstance(p, DTensor), True)
                values = mfsdp_core.gather_full(p.detach()).to(dtype)
                close(name, values.view(first[name].shape), first[name].detach(), 1e-15)
        refuses(LifecycleError, "does not compute", copy.deepcopy(once.units[1]), x)
        same("ties", once.units[0].up.weight is once.units[1].up.weight, True)
        wanted = {n: mfsdp_core.gather_full(p) for n, p in averaged.module.named_parameters()}
        model.load_state_dict(averaged.state_dict(), strict=False)
        for name, p in model.module.named_parameters():
            same(f"{name}, loaded from an average", mfsdp_core.gather_full(p), wanted[name])
        weight = model.module.scale
        for again in (copy.deepcopy(weight), reread({"w": weight}, weights_only=False)["w"]):
            same(
                "a parameter",
                mfsdp_core.gather_full(again.detach()),
                mfsdp_core.gather_full(weight.detach()),
            )
            local = weight.detach().to_local()
            shared = local.numel() and again.detach().to_local().data_ptr() == local.data_ptr()
            assert not shared, "the copy shares memory"


def test_dtensors_of_any_lengths_are_put_together() -> None:
    """Those of a model, torch's own, parts of them, and what is none."""
    model, plain = pair(3)
    mesh = model.module.scale.device_mesh
    whole = torch.arange(42.0).view(7, 6)
    cases = [
        (whole, distribute_tensor(whole, mesh, [placement]))
        for placement in (Shard(0), Shard(1), Replicate())
    ]
    values = {n: p.detach() for n, p in plain.named_parameters()}
    for full_name, p in model.named_parameters():
        cases.append((values[full_name.removeprefix(PREFIX)], p.detach()))
    state = {"a": {"b": cases[0][1]}, "c": 1}
    same("the same dict", preprocess_state_dict_for_uneven_dtensor(state) is state, True)
    for expected, value in cases:
        validate_uneven_dtensor(value)
        same("whole", uneven_dtensor_to_full_tensor(value), expected)
        replicated = gather_uneven_dtensor_to_full_tensor(value)
        same("replicated", replicated.to_local(), expected)
        same("placed", all(p.is_replicate() for p in replicated.placements), True)
        chunk = gather_and_compute_chunk_metadata(value)
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        same("chunk", expected[box], value.to_local())
        for dim in (*range(value.ndim), -1):
            length = value.shape[dim]
            for sections in ([length - 2, 0, 2], 3, length):
                parts = list(split_dtensor(value, sections, dim, True))
                found = [uneven_dtensor_to_full_tensor(part) for part in parts]
                same(f"split {sections} of dim {dim}", found, list(expected.split(sections, dim)))
                _offsets_are_right(parts, list(expected.split(sections, dim)))
    shards = [v for _, v in cases]
    refuses(ConfigurationError, "add up to 3", lambda: list(split_dtensor(shards[0], [1, 2])))
    refuses(TypeError, "Input must be a DTensor", lambda: uneven_dtensor_to_full_tensor(whole))
    odd = DTensor.from_local(
        torch.ones(2, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((5, 2)), stride=(2, 1)
    )
    refuses(LayoutError, "make up a tensor of shape (4, 2)", lambda: validate_uneven_dtensor(odd))
    _made(model, whole)


def _offsets_are_right(parts: list[DTensor], wanted: list[Tensor]) -> None:
    for part, expected in zip(parts, wanted, strict=True):
        local: Any = part._local_tensor
        described = local.__create_chunk_list__()
        for chunk in described:
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            same("described", part.to_local(), expected[box])
        same(
            "described if it is there",
            bool(described),
            bool(part.to_local().numel()) or not expected.numel(),
        )


def _made(model: Any, whole: Tensor) -> None:
    index = model.dist_index
    for _, p in model.named_parameters():
        local = p.detach().to_local().flatten().clone() + 1
        made = make_fsdp_dtensor(
            local, p, index, run_check=True, update_uneven_dtensor_chunk_meta=True
        )
        same("described", bool(hasattr(made._local_tensor, "__create_chunk_list__")), True)
        bare = make_fsdp_dtensor(local.clone(), p, index)
        same("bare", hasattr(bare._local_tensor, "__create_chunk_list__"), False)
        same("made", mfsdp_core.gather_full(made), mfsdp_core.gather_full(p.detach()) + 1)
        all_of_it = mfsdp_core.gather_full(p.detach())
        made = make_fsdp_dtensor(all_of_it.flatten(), p, index, is_sharded_param=False)
        same("whole", made.to_local(), all_of_it)
    p = model.module.scale
    local = p.detach().to_local()
    make: Any = partial(make_fsdp_dtensor, local)
    refuses(
        CapabilityNotBuiltError, "force_sync", make, p, index, force_sync_tp_duplicated_param=True
    )
    refuses(ConfigurationError, "is not all of", lambda: make(p, index, is_sharded_param=False))
    twice = torch.cat([local, local])
    make_fsdp_dtensor(twice, p, index)
    refuses(
        LayoutError,
        "make up a tensor of shape (10,)",
        make_fsdp_dtensor,
        twice,
        p,
        index,
        run_check=True,
    )
    refuses(ConfigurationError, "expects a sharded parameter", make, nn.Parameter(whole), index)
    refuses(ConfigurationError, "are not those", lambda: make(p, copy.copy(index)))
    refuses(ConfigurationError, "are not those", lambda: make(p, index, is_expert_param=True))
