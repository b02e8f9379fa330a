"""Known bugs are noticed by a test of the core; `tests/run/test_patches.py` says they fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.testing.hang_clock import stretched
from mutants import SEEN_BY_TESTS, TESTED, TESTS, is_noticed
from tools.bug_in_a_copy import BUG_BY_ID, BUGS, OWN_BUGS, copy_of_core

#: A rank whose gradient is 1 + 4 x its rank everywhere prints its rows of the reduced one.
RANK = """
import json, sys, torch
import torch.distributed as dist
import mfsdp_core
store, rank = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
model = mfsdp_core.fully_shard_model(torch.nn.Linear(3, 4, bias=False), zero_dp_strategy="optim")
model(torch.full((1, 3), 1.0 + 4 * rank)).sum().backward()
(shard,) = model.parameters()
print(json.dumps([mfsdp_core.__file__, shard.grad.to_local().unique().tolist()]))
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_r1_adds_the_mean_to_what_a_rank_contributed_to_it(tmp_path: Path) -> None:
    core = copy_of_core(tmp_path, BUG_BY_ID["R1"])
    commands = [[sys.executable, "-c", RANK, str(tmp_path / "store"), rank] for rank in "01"]
    ranks = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    answers = [json.loads(rank.communicate(timeout=stretched(100))[0]) for rank in ranks]
    assert answers == [[f"{core}/__init__.py", rows] for rows in ([1 / 2 + 3], [5 / 2 + 3])]


def test_every_known_bug_has_a_test() -> None:
    # R10 is the validator's alone.
    assert SEEN_BY_TESTS.keys() == {bug.stem for bug in (*BUGS, *OWN_BUGS)} - {"R10"}
    for file, names in SEEN_BY_TESTS.values():
        assert names.partition(" and ")[0] in (TESTS / file).read_text()


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("bug", TESTED, ids=lambda bug: bug.stem)
def test_a_test_notices_the_bug(bug: Path, tmp_path: Path) -> None:
    assert is_noticed(bug, tmp_path)
