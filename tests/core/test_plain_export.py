"""Whole weights, out of a sharded model and into one: as a state dict and as safetensors files."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from mfsdp_core import (
    export_state_dict,
    fully_shard_model,
    gather_full,
    load_safetensors,
    save_safetensors,
)
from mfsdp_core.errors import CheckpointError, StateDictError
from oracle.checkpoints import LAYOUTS, Layout, different, toy
from oracle.models import Block, build
from oracle.ranks import RankPool, mesh

pytestmark = pytest.mark.processes

SAMPLE: list[Layout] = [
    (4, "optim_grads_params", "none"),
    (4, "optim", "optim"),
    (2, "no_shard", "none"),
]
NAMES = ["conv_linear", "tied_embedding"]


class Scaled(nn.Module):
    """A scalar parameter, a buffer, and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("seen", torch.arange(3))


def exported_wrongly(name: str, layout: Layout) -> list[str]:
    """What of the exported state dict is not the bare module's; the other ranks export nothing."""
    source = toy(name, layout)
    found = export_state_dict(source.model)
    if dist.get_rank(source.model.checkpoint_group) > 0:
        return list(found)
    bare = build(name)
    bare.load_state_dict(found)
    return different(found, build(name).state_dict())


def written_and_read(name: str, layout: Layout, parent: str, max_file_bytes: int) -> list[str]:
    source, target = toy(name, layout), toy(name, layout, seed=8)
    folder = source.folder(parent)
    save_safetensors(folder, source.model, max_file_bytes=max_file_bytes)
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= safetensors.torch.load_file(file)
    wanted = build(name).state_dict()
    bad = [key for key, value in stored.items() if not torch.equal(value, wanted[key])]
    bad += [key for key, _ in build(name).named_parameters() if key not in stored]
    load_safetensors(folder, target.model)
    output = target.output()
    return bad + different(
        {**target.whole(), "out": output}, {**source.whole(), "out": source.output()}
    )


def scalars_and_buffers(strategy: str, folder: str) -> tuple[float, list[int]]:
    """Read from a file that the bare module has written."""
    if dist.get_rank() == 0:
        bare = Scaled()
        with torch.no_grad():
            bare.scale.fill_(4.5)
            bare.seen.add_(1)
        safetensors.torch.save_file(bare.state_dict(), f"{folder}/bare.safetensors")
    dist.barrier()
    torch.manual_seed(0)
    model: Any = fully_shard_model(
        Scaled(), device_mesh=mesh(4), dp_shard_dim="dp", zero_dp_strategy=strategy
    )
    load_safetensors(f"{folder}/bare.safetensors", model)
    return float(gather_full(model.module.scale)), model.module.seen.tolist()


def half_precision(folder: str) -> list[str]:
    source = toy("linear_stack", SAMPLE[0])
    save_safetensors(folder, source.model, dtype=torch.bfloat16)
    stored = safetensors.torch.load_file(f"{folder}/model.safetensors")
    wanted = {key: v.to(torch.bfloat16) for key, v in build("linear_stack").state_dict().items()}
    return different(stored, wanted)


def refusals(folder: str) -> list[tuple[str, list[str]]]:
    source = toy("linear_stack", SAMPLE[0])
    whole = export_state_dict(source.model)
    first = next(iter(build("linear_stack").state_dict()))
    if dist.get_rank() == 0:
        Path(folder).mkdir()
        broken = {
            "missing": {k: v for k, v in whole.items() if k != first},
            "unexpected": {**whole, "none": torch.zeros(1)},
            "shape": {**whole, first: torch.zeros(7)},
        }
        for name, values in broken.items():
            safetensors.torch.save_file(values, f"{folder}/{name}.safetensors")
        Path(folder, "damaged.safetensors").write_bytes(b"\x08" + bytes(20))
        Path(folder, "lost").mkdir()
        safetensors.torch.save_file(whole, f"{folder}/lost/model-1.safetensors")
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        Path(folder, "lost", "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()
    before, answers = source.whole(), []
    cases: list[tuple[str, type[Exception]]] = [
        ("missing.safetensors", StateDictError),
        ("unexpected.safetensors", StateDictError),
        ("shape.safetensors", StateDictError),
        ("damaged.safetensors", CheckpointError),
        ("lost", CheckpointError),
        ("absent", CheckpointError),
    ]
    for name, error in cases:
        with pytest.raises(error) as caught:
            load_safetensors(f"{folder}/{name}", source.model)
        answers.append((str(caught.value), different(source.whole(), before)))
    return answers


def without_the_package(folder: str) -> str:
    modules = {name: sys.modules.pop(name) for name in list(sys.modules) if "safetensors" in name}
    sys.modules["safetensors"] = None  # type: ignore[assignment]
    try:
        with pytest.raises(CheckpointError) as caught:
            save_safetensors(folder, toy("linear_stack", SAMPLE[0]).model)
    finally:
        sys.modules.update(modules)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", SAMPLE)
def test_the_first_rank_gets_the_bare_modules_state_dict(
    ranks: RankPool, name: str, layout: Layout
) -> None:
    assert ranks.run(exported_wrongly, name, layout) == [[]] * 4


@pytest.mark.parametrize("max_file_bytes", [10**9, 300])
@pytest.mark.parametrize(("name", "layout"), list(zip(NAMES, SAMPLE[:2], strict=True)))
def test_safetensors_files_are_written_and_read_bit_equal(
    ranks: RankPool, name: str, layout: Layout, max_file_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        assert ranks.run(written_and_read, name, layout, parent, max_file_bytes) == [[]] * 4
        (folder,) = Path(parent).iterdir()
        files = list(folder.glob("*.safetensors"))
        assert (len(files) > 1) == (max_file_bytes == 300)
        assert (folder / "model.safetensors.index.json").is_file() == (len(files) > 1)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_safetensors_files_of_every_layout(ranks: RankPool, layout: Layout) -> None:
    with tempfile.TemporaryDirectory() as parent:
        for name in (*NAMES, "frozen", "root_owned"):
            folder = f"{parent}/{name}"
            assert ranks.run(written_and_read, name, layout, folder, 10**9) == [[]] * 4


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_file_of_the_bare_module_loads(ranks: RankPool, strategy: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert ranks.run(scalars_and_buffers, strategy, folder) == [(4.5, [1, 2, 3])] * 4


def test_weights_can_be_written_in_another_dtype(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as parent:
        assert ranks.run(half_precision, f"{parent}/files") == [[]] * 4


def test_files_that_do_not_fit_are_refused_before_anything_is_changed(ranks: RankPool) -> None:
    says = [
        "Missing from them: ['blocks.0.norm.weight']",
        "Unexpected in them: ['none']",
        "the model has shape (6,), the files (7,)",
        "SafetensorError",
        "names files that are not there: {'model-2.safetensors'}",
        "expected a .safetensors file or a folder of them",
    ]
    with tempfile.TemporaryDirectory() as parent:
        for answers in ranks.run(refusals, f"{parent}/files"):
            for (message, changed), wanted in zip(answers, says, strict=True):
                assert wanted in message
                assert changed == []


def test_a_missing_package_is_named(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as parent:
        for message in ranks.run(without_the_package, f"{parent}/files"):
            assert "need the package safetensors, which is not installed" in message
