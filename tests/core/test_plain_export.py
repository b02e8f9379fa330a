"""Whole weights, out of a sharded model and into one: as a state dict and as safetensors files."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import safetensors.torch
import torch

from conformance.judging import same
from mfsdp_core import (
    load_safetensors,
    save_safetensors,
)
from mfsdp_core.errors import CheckpointError
from oracle.checkpoints import LAYOUTS, Layout, different, toy
from oracle.models import build

pytestmark = pytest.mark.on_ranks

SAMPLE: list[Layout] = [
    (4, "optim_grads_params", "none"),
    (4, "optim", "optim"),
]
NAMES = ["conv_linear", "tied_embedding"]


def compare(name: str, layout: Layout, parent: Path, max_file_bytes: int = 10**9) -> None:
    """What is written with the weights, and a model that reads it with the one that wrote."""
    source, target = toy(name, layout), toy(name, layout, seed=8)
    folder = source.folder(str(parent))
    save_safetensors(folder, source.model, max_file_bytes=max_file_bytes)
    files = list(folder.glob("*.safetensors"))
    assert (len(files) > 1) == (max_file_bytes == 300), files
    assert (folder / "model.safetensors.index.json").is_file() == (len(files) > 1)
    stored: dict[str, torch.Tensor] = {}
    for file in files:
        stored |= safetensors.torch.load_file(file)
    wanted = build(name).state_dict()
    for key, value in stored.items():
        same(key, value, wanted[key])
    assert all(key in stored for key, _ in build(name).named_parameters())
    load_safetensors(folder, target.model)
    assert different(target.whole(), source.whole()) == []
    same("output", target.output(), source.output())


@pytest.mark.parametrize("max_file_bytes", [10**9, 300])
@pytest.mark.parametrize(("name", "layout"), list(zip(NAMES, SAMPLE, strict=True)))
def test_safetensors_files_are_written_and_read_bit_equal(
    name: str, layout: Layout, max_file_bytes: int, tmp_path: Path
) -> None:
    compare(name, layout, tmp_path, max_file_bytes)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*NAMES, "frozen", "root_owned"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_safetensors_files_of_every_layout(name: str, layout: Layout, tmp_path: Path) -> None:
    compare(name, layout, tmp_path)


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    made = toy("linear_stack", SAMPLE[0])
    absent = {name: None for name in sys.modules if "safetensors" in name} | {"safetensors": None}
    words = "need the package safetensors, which is not installed"
    with patch.dict(sys.modules, absent), pytest.raises(CheckpointError, match=words):
        save_safetensors(tmp_path / "files", made.model)
