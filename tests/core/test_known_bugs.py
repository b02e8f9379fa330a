"""Known bugs are noticed by a test of the core; `tests/run/test_patches.py` says they fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.testing.workers import ForkServer
from mutants import SEEN_BY_TESTS, TESTED, TESTS, is_noticed
from tools.bug_in_a_copy import BUG_BY_ID, BUGS, OWN_BUGS, copy_of_core


def rows_of_the_reduced_gradient() -> tuple[str, list[float]]:
    """In a rank whose gradient is 1 + 4 x its rank everywhere; and the core that it imports."""
    import mfsdp_core

    layer = torch.nn.Linear(3, 4, bias=False)
    model = mfsdp_core.fully_shard_model(layer, zero_dp_strategy="optim")
    model(torch.full((1, 3), 1.0 + 4 * dist.get_rank())).sum().backward()
    (shard,) = model.parameters()
    return str(mfsdp_core.__file__), shard.grad.to_local().unique().tolist()


@pytest.mark.processes
def test_r1_adds_the_mean_to_what_a_rank_contributed_to_it(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    core = copy_of_core(tmp_path, BUG_BY_ID["R1"])
    with fork_server.workers(2, tmp_path) as ranks:
        answers = ranks.run(rows_of_the_reduced_gradient, seconds=100)
    assert answers == [(f"{core}/__init__.py", rows) for rows in ([1 / 2 + 3], [5 / 2 + 3])]


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
