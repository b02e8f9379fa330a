"""Checkpoints that others have written are read without running what they bring."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from oracle.ranks import RankPool

pytestmark = pytest.mark.processes


class Malicious:
    """Unpickling it creates the file `trace`."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


def safe_readers_of_plain_checkpoints(folder: str) -> tuple[bool, str]:
    """A value that is pickled data loads; one that would run code does not."""
    from mfsdp_core.state.safe_dcp import SafeLoadPlanner, SafeReader

    trace = Path(folder).with_name(f"trace-{dist.get_rank()}")
    good, bad = {"options": {"lr": [0.5]}}, {"options": Malicious(trace)}
    for name, state in (("good", good), ("bad", bad)):
        dcp.save(state, checkpoint_id=f"{folder}-{name}")
    read: Any = {"options": {"lr": None}}
    dcp.load(read, storage_reader=SafeReader(f"{folder}-good"), planner=SafeLoadPlanner())
    assert read == good
    with pytest.raises(BaseException, match="loading it could run code") as caught:
        dcp.load(
            {"options": None}, storage_reader=SafeReader(f"{folder}-bad"), planner=SafeLoadPlanner()
        )
    return trace.exists(), str(caught.value)


def test_plain_checkpoints_can_be_read_without_running_their_code(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as parent:
        for ran, message in ranks.run(safe_readers_of_plain_checkpoints, f"{parent}/plain"):
            assert not ran
            assert "could run code" in message
