"""Ranks that came apart are named, with the unit, also where a watchdog ends the process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launched_runs import launched

from bench.launch.desync import Issued, describe, desync
from bench.resolve import Machine, resolve
from bench.spec import EngineSpec, LaunchSpec, ModelSpec, RunSpec, TrainSpec
from bench.worker.collective_log import CollectiveLog
from mfsdp_core.comm.wire_log import WireLog
from mfsdp_core.events import Event

HERE = Path(__file__).parent
ALIKE = {1: "all_gather of a/0 (inner)", 2: "all_gather of b/0 (inner)"}


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ({}, ""),
        (
            {0: Issued(2, ALIKE), 1: Issued(2, ALIKE)},
            "ranks 0 and 1 have issued 2 collectives, all_gather of b/0 (inner) last",
        ),
        (
            {0: Issued(2, ALIKE), 1: Issued(1, {1: ALIKE[1]}), 2: Issued(2, ALIKE)},
            "ranks differ in collective 2: ranks 0 and 2 issued all_gather of b/0 (inner),"
            " rank 1 issued no more after 1, all_gather of a/0 (inner)",
        ),
        (
            {0: Issued(3, ALIKE | {3: "x"}), 1: Issued(3, ALIKE | {2: "y", 3: "x"})},
            "ranks differ in collective 2: rank 0 issued all_gather of b/0 (inner), rank 1"
            " issued y",
        ),
        ({0: Issued(1, {1: "x"}), 1: Issued(0, {})}, "rank 1 has issued none"),
        (
            {
                0: Issued(9, {8: "x", 9: "y"}, "nccl:all_reduce 8 of 0, [[4]]"),
                1: Issued(9, {9: "y"}),
            },
            "; rank 0 has not ended nccl:all_reduce 8 of 0, [[4]]",
        ),
    ],
)
def test_the_first_collective_that_ranks_do_not_share_is_named(
    ranks: dict[int, Issued], said: str
) -> None:
    assert said in describe(ranks)


class _Counting:
    """An engine whose collectives are put in by hand."""

    def __init__(self) -> None:
        self.log = WireLog()

    def issue(self, bucket: str) -> None:
        self.log(Event("collective", "all_gather", "float32", 4, "inner", 2, bucket))

    def issued(self) -> int:
        return self.log.issued

    def latest_collectives(self, number: int) -> list[tuple[int, str]]:
        return [(index, one.bucket) for index, one in self.log.latest(number)]


def _until(what: object, wanted: bool) -> None:
    while what.exists() is not wanted:  # type: ignore[attr-defined]
        time.sleep(0.005)


def test_a_rank_that_stands_still_leaves_a_note_and_takes_it_back_when_it_goes_on(
    tmp_path: Path,
) -> None:
    engine, path = _Counting(), tmp_path / "issued.rank3.json"
    for bucket in "abc":
        engine.issue(bucket)
    with CollectiveLog(engine, path, look_seconds=0.01):
        _until(path, True)
        assert desync(tmp_path) == "rank 3 has issued 3 collectives, c last"
        engine.issue("d")
        _until(path, False)


@pytest.mark.processes
def test_a_watchdog_that_ends_the_process_leaves_the_unit_and_the_rank_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE)
    resolved = resolve(
        RunSpec(
            model=ModelSpec(factory="stuck_model:build"),
            engine=EngineSpec(name="mfsdp"),
            train=TrainSpec(steps=8, lr=3e-3),
            launch=LaunchSpec(ranks=2, hang_seconds=100),
        ),
        Machine(cpu_count=2, memory_bytes=16 * 2**30),
    )
    status = launched(tmp_path, resolved).status
    assert (status.state, status.failed_rank) == ("crashed", 0)
    assert "rank 0 was ended by SIGABRT" in status.reason
    assert "ranks differ in collective" in status.reason
    assert "rank 1 issued no more after" in status.reason
    assert "all_gather of blocks.2/0 (inner)" in status.reason
