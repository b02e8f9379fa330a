"""Arms that train in turn: one that dies, hangs or is stopped frees the one that is parked."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from bench.launch import Limits, launch
from bench.launch.stop_request import StopRequest
from bench.record import RunRecord
from bench.resolve.resolution import resolve_anywhere
from bench.spec import LaunchSpec, RunSpec, TrainSpec
from bench.store import ResultsStore
from bench.testing.load_clock import LoadClock, stretched
from sweeps.execution import Side
from sweeps.plan import Plan, PlannedArm, PlannedCell
from sweeps.resume import RunOptions, compare_with_records
from sweeps.runner import SweepOutcome, run_sides

pytestmark = pytest.mark.processes

WORKERS = Path(__file__).parent / "workers"
ARMS = ("base", "head")
LIMITS = Limits(tick_seconds=0.1, grace_seconds=1.0)
TURNS = 4


class Arms:
    """One block of two arms of scripted ranks; each arm has a script of its own."""

    def __init__(self, store: ResultsStore) -> None:
        self.store = store
        self.stop = StopRequest()
        self.outcome: SweepOutcome | None = None

    def run(
        self,
        head: dict[int, tuple[int, str]] | None = None,
        *,
        steps: int = 12,
        during: Callable[[], None] | None = None,
        **limits: float,
    ) -> dict[str, RunRecord]:
        """The records by arm. during: called in a thread beside the block."""
        by_arm = {}
        for arm, script in (("base", {}), ("head", head or {})):
            env = {"MFSDP_TEST_SCRIPT": json.dumps(script)}
            launch_spec = LaunchSpec(ranks=2, env=env, **limits)
            spec = RunSpec(train=TrainSpec(steps=steps), launch=launch_spec)
            by_arm[arm] = resolve_anywhere(spec)
        cell = PlannedCell("c", {}, by_arm["base"], 1, by_arm)
        arms = tuple(PlannedArm(name, "", None, None, "", "") for name in ARMS)
        self.plan = Plan(
            id="s",
            name="s",
            description="",
            source="s.yaml",
            cells=(cell,),
            arms=arms,
            interleaved=True,
            turns=TURNS,
        )
        start = partial(launch, worker_module="scripted_worker", limits=LIMITS)
        sides = {arm: Side(start, lambda _: "code") for arm in ARMS}
        beside = threading.Thread(target=during or (lambda: None))
        beside.start()
        options = RunOptions(block_retries=0, seed=1)
        self.outcome = run_sides(
            self.plan, self.store, sides=sides, options=options, stop=self.stop
        )
        beside.join()
        return {str(record.status.arm): record for record in self.store.records(sweep="s")}

    def folder(self, arm: str) -> Path:
        """Of the run of `arm`, as soon as its ranks train."""
        clock = LoadClock()
        while clock.seconds() < 20:
            for status in self.store.root.glob("runs/*/*/status.json"):
                if json.loads(status.read_text())["arm"] == arm and self.steps(status.parent):
                    return status.parent
            time.sleep(0.05)
        raise AssertionError(f"arm {arm} never trained")

    @staticmethod
    def steps(folder: Path) -> int:
        files = list(folder.glob("steps.rank*.jsonl"))
        return min((file.read_bytes().count(b"\n") for file in files), default=0)

    def parked(self, arm: str) -> Path:
        """As `folder`, once the other arm trains in the place of `arm`."""
        (other,) = set(ARMS) - {arm}
        here, there = self.folder(arm), self.folder(other)
        clock = LoadClock()
        while clock.seconds() < 60:
            before = self.steps(here), self.steps(there)
            time.sleep(0.2)
            after = self.steps(here), self.steps(there)
            if before[0] == after[0] and before[1] < after[1]:
                return here
        raise AssertionError(f"arm {arm} was never parked")

    def lost(self, arm: str, records: dict[str, RunRecord]) -> str:
        """What the run of `arm` says, which was ended because the other one failed."""
        status = records[arm].status
        assert status.state == "interrupted"
        assert self.outcome is not None
        assert [run.arm for run in self.outcome.lost] == [arm]
        assert [run.arm for run in self.outcome.failed] == sorted(set(ARMS) - {arm})
        return status.reason


@pytest.fixture
def arms(store: ResultsStore, monkeypatch: pytest.MonkeyPatch) -> Arms:
    monkeypatch.setenv("PYTHONPATH", str(WORKERS))
    return Arms(store)


@pytest.mark.nightly
def test_arms_train_one_at_a_time_and_in_reversed_order_every_other_round(arms: Arms) -> None:
    records = arms.run()
    assert [records[arm].status.state for arm in ARMS] == ["ok", "ok"]
    trained = []
    for arm in ARMS:
        for samples in records[arm].steps.values():
            assert [sample.turn for sample in samples] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
            trained += [(one.device["from"], one.device["to"], arm, one.turn) for one in samples]
    trained.sort()
    assert all(
        before[1] <= after[0] for before, after in pairwise(trained) if before[2] != after[2]
    )
    turns = list(dict.fromkeys((arm, turn) for _, _, arm, turn in trained))
    first, second = turns[0][0], turns[1][0]
    rounds = [(first, second), (second, first)] * (TURNS // 2)
    assert turns == [(arm, turn) for turn, both in enumerate(rounds) for arm in both]
    plan, options = replace(arms.plan, seed=1), RunOptions(block_retries=0)
    done = compare_with_records(plan, records.values(), lambda _: "code", options).done
    assert [run.arm for run in done] == [first, second]


# Daily with runs that are stood in for: tests/matrix/test_turns_of_blocks.py.
@pytest.mark.nightly
def test_an_arm_that_is_killed_in_its_turn_ends_the_parked_one(arms: Arms) -> None:
    # base trains on as soon as head is dead, and would be through with a few steps.
    records = arms.run(steps=400, head={1: (105, f"signal {signal.SIGKILL}")})
    assert records["head"].status.state == "crashed"
    assert "rank 1 was ended by SIGKILL" in records["head"].status.reason
    assert "its block was lost: arm head crashed: rank 1 was" in arms.lost("base", records)


@pytest.mark.nightly
def test_an_arm_that_hangs_in_its_turn_is_a_hang_and_the_parked_one_is_not(arms: Arms) -> None:
    records = arms.run(head={1: (5, "hang")}, hang_seconds=stretched(1.5))
    assert records["head"].status.state == "hang"
    assert records["head"].status.failed_rank == 1
    assert "arm head hang" in arms.lost("base", records)


@pytest.mark.nightly
def test_time_in_which_an_arm_is_parked_is_no_hang(arms: Arms) -> None:
    # The last turn of head takes 3.6 s, longer than a hang of base may.
    records = arms.run(
        head={0: (10, "slow down"), 1: (10, "slow down")}, hang_seconds=stretched(2.5)
    )
    assert [records[arm].status.state for arm in ARMS] == ["ok", "ok"]


@pytest.mark.nightly
def test_an_arm_that_is_killed_while_parked_ends_the_one_that_trains(arms: Arms) -> None:
    def kill() -> None:
        folder = arms.parked("head")
        os.kill(int((folder / "pid.rank0").read_text()), signal.SIGKILL)

    records = arms.run(steps=400, during=kill)
    assert records["head"].status.state == "crashed"
    assert "rank 0 was ended by SIGKILL" in records["head"].status.reason
    assert "arm head crashed" in arms.lost("base", records)


@pytest.mark.nightly
def test_an_arm_that_is_stopped_while_parked_is_a_hang_once_its_turn_comes(arms: Arms) -> None:
    def freeze() -> None:
        folder = arms.parked("head")
        os.kill(int((folder / "pid.rank0").read_text()), signal.SIGSTOP)

    records = arms.run(steps=400, during=freeze, hang_seconds=stretched(1.5))
    assert records["head"].status.state == "hang"
    assert "rank 0 is stopped (SIGSTOP)" in records["head"].status.reason
    assert "arm head hang" in arms.lost("base", records)


@pytest.mark.nightly
def test_a_stop_of_the_sweep_ends_both_arms(arms: Arms) -> None:
    def stop() -> None:
        arms.parked("head")
        arms.stop.why = "stopped by the test"
        arms.stop.set()

    records = arms.run(steps=400, during=stop)
    assert [records[arm].status.state for arm in ARMS] == ["interrupted"] * 2
    assert all("stopped by the test" in records[arm].status.reason for arm in ARMS)
    assert arms.outcome is not None
    assert (arms.outcome.failed, arms.outcome.interrupted) == ((), True)


@pytest.mark.nightly
def test_an_arm_that_fails_before_its_first_step_frees_the_one_that_waits(arms: Arms) -> None:
    records = arms.run(head={0: (1, "raise")})
    assert records["head"].status.state == "crashed"
    assert "arm head crashed" in arms.lost("base", records)
