"""Which cells take turns, and what becomes of a block whose arms were started together."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.record import RunStatus
from bench.resolve.resolution import resolve_anywhere
from bench.spec import LaunchSpec, RunSpec, TrainSpec
from bench.store import ResultsStore
from sweeps import turns
from sweeps.execution import Side
from sweeps.plan import Plan, PlannedArm, PlannedCell
from sweeps.progress import Remark
from sweeps.resume import RunOptions
from sweeps.runner import SweepOutcome, run_sides
from sweeps.turns import possible_turns

ARMS = ("base", "head")
HERE = dict.fromkeys(ARMS)


def runs(steps: int = 12, **launch: object) -> dict:
    spec = RunSpec(train=TrainSpec(steps=steps), launch=LaunchSpec(ranks=2, **launch))
    return dict.fromkeys(ARMS, resolve_anywhere(spec))


def test_arms_on_the_cpu_of_this_machine_take_turns():
    assert possible_turns(4, runs(), HERE) == (4, "")
    assert possible_turns(1, runs(device="cuda"), HERE) == (1, "")


def test_few_steps_make_few_turns():
    count, why = possible_turns(8, runs(steps=12), HERE)
    assert (count, why) == (4, "4 turns instead of 8, as one needs 3 steps")
    assert possible_turns(8, runs(steps=2), HERE)[0] == 1


def test_what_cannot_take_turns_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for launch in ({"device": "cuda"}, {"nodes": 2}):
        count, why = possible_turns(4, runs(**launch), HERE)
        assert (count, "on the CPU of one machine" in why) == (1, True)
    older = {"base": SimpleNamespace(root=tmp_path), "head": None}
    count, why = possible_turns(4, runs(), older)
    assert (count, "the bench of arm base is older than turns" in why) == (1, True)
    free = SimpleNamespace(available=1000)
    monkeypatch.setattr(turns.psutil, "virtual_memory", lambda: free)
    count, why = possible_turns(4, runs(), HERE)
    assert (count, "GiB together" in why) == (1, True)


class Stand:
    """Takes the place of a launch; `ends`: states of the next runs of an arm."""

    def __init__(self) -> None:
        self.ends: dict[str, list[str]] = {}
        self.seen: list[tuple[str, bool]] = []

    def __call__(self, _resolved, folder, *, stop, slot=None, **_) -> RunStatus:
        arm = str(folder.status.arm)
        self.seen.append((arm, slot is not None))
        folder.write_environment({})
        state = self.ends[arm].pop(0) if self.ends.get(arm) else "ok"
        if state == "waits":
            until = time.monotonic() + 5
            while not stop.is_set() and time.monotonic() < until:
                time.sleep(0.01)
            state = "interrupted" if stop.is_set() else "hang"
        why = stop.why if state == "interrupted" else "as told"
        status = folder.status.model_copy(update={"state": state, "reason": why})
        folder.write_status(status)
        return status


@pytest.fixture
def stand() -> Stand:
    return Stand()


def go(root: Path, stand: Stand) -> tuple[SweepOutcome, list[str]]:
    cell = PlannedCell("c", {}, runs()["base"], 1)
    arms = tuple(PlannedArm(name, "", None, None, "", "") for name in ARMS)
    plan = Plan(
        id="s",
        name="s",
        description="",
        source="s.yaml",
        cells=(cell,),
        arms=arms,
        interleaved=True,
        turns=4,
    )
    said: list[str] = []
    outcome = run_sides(
        replace(plan, seed=1),
        ResultsStore.open(root / "results", create=True),
        sides={arm: Side(stand, lambda _: "code") for arm in ARMS},
        options=RunOptions(block_retries=1, seed=1),
        publish=lambda event: said.append(event.text) if isinstance(event, Remark) else None,
    )
    return outcome, said


def test_an_arm_that_fails_ends_the_other_and_the_block_is_started_again(tmp_path, stand):
    stand.ends = {"base": ["waits"], "head": ["crashed"]}
    outcome, said = go(tmp_path, stand)
    assert sorted(stand.seen) == [(arm, True) for arm in ARMS for _ in "ab"]
    assert sorted((run.arm, run.state) for run in outcome.ran) == [("base", "ok"), ("head", "ok")]
    lost = {run.arm: (run.state, run.reason) for run in outcome.lost}
    why = "its block was lost: arm head crashed: as told"
    assert lost == {"base": ("interrupted", why), "head": ("crashed", "as told")}
    assert said == []


def test_a_block_that_is_given_up_blames_the_arm_that_failed(tmp_path, stand):
    stand.ends = {"base": ["waits"], "head": ["nan"]}
    outcome, _ = go(tmp_path, stand)
    assert [(run.arm, run.state) for run in outcome.failed] == [("head", "nan")]
    assert [run.arm for run in outcome.lost] == ["base"]
    assert outcome.ended_by_user == ()


def test_arms_that_do_not_fit_together_run_one_by_one(tmp_path, stand):
    stand.ends = {"base": ["waits"], "head": ["out_of_memory"]}
    outcome, said = go(tmp_path, stand)
    assert sorted(stand.seen[:2]) == [("base", True), ("head", True)]
    assert sorted(stand.seen[2:]) == [("base", False), ("head", False)]
    assert outcome.failed == ()
    assert said == ["c: no turns any more; its arms may fit one by one"]
