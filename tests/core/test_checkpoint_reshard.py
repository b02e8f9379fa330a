"""What is saved under one world size, strategy and hybrid mode loads bit-equal under any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from mfsdp_core import load_checkpoint, save_checkpoint
from oracle.checkpoints import LAYOUTS, Layout, different, toy

pytestmark = pytest.mark.on_ranks


def compare(name: str, layouts: list[Layout], parent: Path) -> None:
    """Every pair of `layouts`: saved by each replica of one, and loaded under the other."""
    wanted = {}
    for layout in layouts:
        source = toy(name, layout)
        source.train(2)
        wanted[layout] = source.whole() | {"output": source.output()}
        folder = source.folder(str(parent))
        save_checkpoint(folder, source.model, source.optimizer, extra={"step": 2})
    for target_layout in layouts:
        target = toy(name, target_layout, seed=8)
        for layout, expected in wanted.items():
            folder = parent / f"{'-'.join(map(str, layout))}-0"
            extra = load_checkpoint(folder, target.model, target.optimizer)
            found = target.whole() | {"output": target.output()}
            assert different(found, expected) == [], f"{layout} -> {target_layout}"
            assert extra == {"step": 2}, f"{layout} -> {target_layout}"


@pytest.mark.parametrize("name", ["tied_embedding", "frozen"])
def test_tied_and_frozen_parameters_reshard(name: str, tmp_path: Path) -> None:
    compare(name, [(2, "no_shard", "none"), (4, "optim_grads_params", "optim")], tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.on_ranks(seconds=1500.0)
@pytest.mark.parametrize("name", ["conv_linear", "tied_embedding", "frozen", "root_owned"])
def test_every_layout_reshards_into_every_other(name: str, tmp_path: Path) -> None:
    compare(name, LAYOUTS, tmp_path)
