"""A memory snapshot is JSON: nothing in it is a pickle, and nothing of it is lost."""

from __future__ import annotations

import inspect
import json

import pytest
import torch

from bench.meters import memory_snapshot
from bench.meters.memory_snapshot import MemorySnapshot, document
from bench.resolve.resolution import resolve_anywhere
from bench.spec import MeasureSpec, RunSpec

FRAME = {"filename": "train.py", "line": 3, "name": "step"}
BLOCK = {"address": 4096, "size": 512, "state": "active_allocated", "frames": [FRAME] * 20}
SNAPSHOT = {
    "segments": [
        {
            "address": 4096,
            "total_size": 2 << 20,
            "allocated_size": 512,
            "segment_pool_id": (0, 1),
            "blocks": [BLOCK],
        }
    ],
    "device_traces": [[{"action": "alloc", "addr": 4096, "size": 512, "frames": [FRAME]}]],
}


class NeverRun:
    def __reduce__(self):
        raise AssertionError("pickled")


def test_segments_blocks_and_events_are_plain_data_with_few_frames():
    found = json.loads(json.dumps(document(SNAPSHOT | {"external": NeverRun()})))
    assert (found["reserved_bytes"], found["allocated_bytes"]) == (2 << 20, 512)
    (segment,) = found["segments"]
    assert segment["segment_pool_id"] == [0, 1]
    assert segment["blocks"][0]["frames"] == [FRAME] * 8
    assert found["events"] == SNAPSHOT["device_traces"]


def test_the_history_is_bounded_and_ends_with_the_profile(tmp_path, monkeypatch):
    """No CUDA here: the calls are bound to torch's own signatures."""
    calls = []
    record = inspect.signature(torch.cuda.memory._record_memory_history)
    take = inspect.signature(torch.cuda.memory._snapshot)
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda *a, **k: calls.append(record.bind(*a, **k).arguments),
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_snapshot", lambda *a, **k: take.bind(*a, **k) and SNAPSHOT
    )
    resolved = resolve_anywhere(RunSpec(measure=MeasureSpec(profile="memory")))
    path = tmp_path / "snapshot.json"
    device = torch.device("cuda", 0)
    assert MemorySnapshot.of(resolved, path, torch.device("cpu")) is None
    meter = MemorySnapshot.of(resolved, path, device)
    for step in (1, 2, 3, 4):
        meter.after_step(step)
        assert path.exists() == (step >= 3)
    meter.stop()
    assert [call["enabled"] for call in calls] == ["all", None]
    assert calls[0]["max_entries"] == memory_snapshot.MOST_EVENTS
    assert json.loads(path.read_text())["schema"] == 1


@pytest.mark.gpu
def test_this_devices_allocator_is_written_as_json(tmp_path):
    device = torch.device("cuda", 0)
    meter = MemorySnapshot(tmp_path / "snapshot.json", device)
    kept = torch.empty(3 << 20, dtype=torch.uint8, device=device)
    meter.stop()
    found = json.loads((tmp_path / "snapshot.json").read_text())
    assert any(event["size"] >= kept.nbytes for events in found["events"] for event in events)
    assert found["reserved_bytes"] >= found["allocated_bytes"] >= kept.nbytes
