"""Checkpoints that others have written are read without running what they bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from mfsdp_core.state.safe_dcp import SafeLoadPlanner, SafeReader

pytestmark = pytest.mark.on_ranks


class Malicious:
    """Unpickling it creates the file `trace`."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


def test_plain_checkpoints_can_be_read_without_running_their_code(tmp_path: Path) -> None:
    """A value that is pickled data loads; one that would run code does not."""
    trace = tmp_path / f"trace-{dist.get_rank()}"
    good, bad = {"options": {"lr": [0.5]}}, {"options": Malicious(trace)}
    for name, state in (("good", good), ("bad", bad)):
        dcp.save(state, checkpoint_id=tmp_path / name)
    read: Any = {"options": {"lr": None}}
    dcp.load(read, storage_reader=SafeReader(tmp_path / "good"), planner=SafeLoadPlanner())
    assert read == good
    reader = SafeReader(tmp_path / "bad")
    with pytest.raises(BaseException, match="loading it could run code"):
        dcp.load({"options": None}, storage_reader=reader, planner=SafeLoadPlanner())
    assert not trace.exists()
