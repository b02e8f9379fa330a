"""Whole weights, out of a sharded model and into one: as a state dict and as safetensors files."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

from mfsdp_core import (
    load_safetensors,
    save_safetensors,
)
from mfsdp_core.errors import CheckpointError
from oracle.checkpoints import LAYOUTS, Layout, different, toy
from oracle.models import build
from oracle.ranks import RankPool

pytestmark = pytest.mark.processes

SAMPLE: list[Layout] = [
    (4, "optim_grads_params", "none"),
    (4, "optim", "optim"),
    (2, "no_shard", "none"),
]
NAMES = ["conv_linear", "tied_embedding"]


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


def without_the_package(folder: str) -> str:
    modules = {name: sys.modules.pop(name) for name in list(sys.modules) if "safetensors" in name}
    sys.modules["safetensors"] = None  # type: ignore[assignment]
    try:
        with pytest.raises(CheckpointError) as caught:
            save_safetensors(folder, toy("linear_stack", SAMPLE[0]).model)
    finally:
        sys.modules.update(modules)
    return str(caught.value)


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


def test_a_missing_package_is_named(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as parent:
        for message in ranks.run(without_the_package, f"{parent}/files"):
            assert "need the package safetensors, which is not installed" in message
