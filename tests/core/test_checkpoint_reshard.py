"""What is saved under one world size, strategy and hybrid mode loads bit-equal under any other."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from mfsdp_core import load_checkpoint, save_checkpoint
from oracle.checkpoints import LAYOUTS, Layout, TrainedToy, different, toy
from oracle.ranks import RankPool

pytestmark = pytest.mark.processes

#: One of each kind: whole and sharded, even and uneven, one and two axes.
SAMPLE: list[Layout] = [
    (1, "optim", "none"),
    (2, "no_shard", "none"),
    (4, "optim_grads_params", "none"),
    (4, "optim_grads_params", "optim"),
]


def saved(name: str, layout: Layout, parent: str) -> tuple[TrainedToy, dict[str, Any]]:
    """A trained model of `layout`, saved by each of its replicas, and what it consisted of."""
    source = toy(name, layout)
    source.train(2)
    wanted = source.whole()
    wanted["output"] = source.output()
    save_checkpoint(source.folder(parent), source.model, source.optimizer, extra={"step": 2})
    return source, wanted


def reshard_failures(name: str, layouts: list[Layout], parent: str) -> list[str]:
    """Every pair of `layouts`: what differs after loading, by source, target and name."""
    wanted = {layout: saved(name, layout, parent)[1] for layout in layouts}
    failures = []
    for target_layout in layouts:
        target = toy(name, target_layout, seed=8)
        for source_layout, expected in wanted.items():
            folder = Path(parent) / f"{'-'.join(map(str, source_layout))}-0"
            extra = load_checkpoint(folder, target.model, target.optimizer)
            found = target.whole()
            found["output"] = target.output()
            bad = different(found, expected)
            failures += [f"{source_layout} -> {target_layout}: {what}" for what in bad]
            if extra != {"step": 2}:
                failures.append(f"{source_layout} -> {target_layout}: extra {extra}")
    return failures


def check(ranks: RankPool, name: str, layouts: list[Layout], seconds: float) -> None:
    with tempfile.TemporaryDirectory() as parent:
        assert ranks.run(reshard_failures, name, layouts, parent, seconds=seconds) == [[]] * 4


@pytest.mark.nightly
def test_a_sample_of_layouts_reshards_bit_equal(ranks: RankPool) -> None:
    check(ranks, "conv_linear", SAMPLE, 60)


@pytest.mark.parametrize("name", ["tied_embedding", "frozen"])
def test_tied_and_frozen_parameters_reshard(ranks: RankPool, name: str) -> None:
    check(ranks, name, [SAMPLE[1], SAMPLE[3]], 60)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["conv_linear", "tied_embedding", "frozen", "root_owned"])
def test_every_layout_reshards_into_every_other(ranks: RankPool, name: str) -> None:
    check(ranks, name, LAYOUTS, 1500)
