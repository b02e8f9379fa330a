"""Interleaved arms: the order that is drawn, and blocks lost, repeated and resumed whole."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import pytest
import stand_in_runs
from hypothesis import given
from hypothesis import strategies as st
from stand_in_runs import Run, StandIn, plan_of

from bench.derive.blocks import complete_blocks, is_interleaved
from bench.plan import Plan
from bench.store import ResultsStore
from sweeps.blocks import arm_order, planned_blocks
from sweeps.progress import BlockLost, Remark
from sweeps.resume import standing_in
from sweeps.runner import Side, SweepOutcome

THREE = """\
name: a
matrix:
  product: {engine.name: [ddp, fsdp2, mfsdp]}
"""

names = st.lists(st.text("abcdefgh", min_size=1, max_size=5), min_size=2, max_size=5, unique=True)
sweeps = st.text("abc", max_size=9)


def plan_with(arms, repeat: int = 4) -> Plan:
    return plan_of(THREE, tuple(arms), repeat=repeat)


@given(names, sweeps, st.integers(0, 10_000))
def test_each_block_holds_each_arm_once_and_a_sweep_gives_the_same_order_again(
    arms, sweep: str, block: int
) -> None:
    order = arm_order(arms, sweep=sweep, cell="c", block=block)
    assert sorted(order) == sorted(arms)
    assert arm_order(arms, sweep=sweep, cell="c", block=block) == order


@given(names, sweeps, st.integers(1, 60))
def test_after_any_number_of_blocks_no_arm_was_first_more_than_once_more_than_another(
    arms, sweep: str, count: int
) -> None:
    firsts = Counter(arm_order(arms, sweep=sweep, cell="c", block=n)[0] for n in range(count))
    starts = [firsts[arm] for arm in arms]
    assert max(starts) - min(starts) <= 1


def test_the_first_arm_is_drawn_anew_for_every_sweep_and_every_cell() -> None:
    firsts = Counter(arm_order("ab", sweep=f"{n}", cell="c", block=0)[0] for n in range(2000))
    assert 900 < firsts["a"] < 1100

    def orders(sweep: str, cell: str) -> list[tuple[str, ...]]:
        return [arm_order("ab", sweep=sweep, cell=cell, block=n) for n in range(40)]

    assert orders("1", "x") != orders("2", "x")
    assert orders("1", "x") != orders("1", "y")


def test_blocks_are_spread_over_the_whole_sweep_and_stay_when_more_come_or_few_are_chosen() -> None:
    plan = plan_with("ab", repeat=8)
    order = [(block.number, block.cell.id) for block in planned_blocks(plan)]
    assert order == [(n, cell) for n in range(8) for cell in ("ddp", "fsdp2", "mfsdp")]
    arms = {(b.cell.id, b.number): b.arms for b in planned_blocks(plan)}
    for more in (1, 5):
        many = planned_blocks(plan_with("ab", repeat=8 + more))
        assert arms.items() <= {(b.cell.id, b.number): b.arms for b in many}.items()
    chosen = {(b.cell.id, b.number): b.arms for b in planned_blocks(plan.selected(["fsdp2"]))}
    assert chosen == {key: arms[key] for key in arms if key[0] == "fsdp2"}


def test_arms_survive_plan_json_and_plans_with_a_seed_or_from_before_there_were_arms_are_read() -> (
    None
):
    plan = plan_with("ab")
    assert Plan.from_document(plan.to_document() | {"seed": 11}) == plan
    read = Plan.from_document(plan.to_document())
    assert read == plan
    assert [b.arms for b in planned_blocks(read)] == [b.arms for b in planned_blocks(plan)]
    former = plan_of(THREE)
    document = former.to_document()
    for key in ("arms", "interleaved"):
        del document[key]
    assert Plan.from_document(document) == former


SWEEP = """\
name: a
base: {train.steps: 3}
matrix:
  product: {engine.name: [ddp, mfsdp]}
"""
ARMS = ("base", "head")


def blocks(repeat: int = 2, *, interleaved: bool = True) -> Plan:
    return replace(plan_of(SWEEP, ARMS, repeat=repeat), interleaved=interleaved)


@pytest.fixture
def stand() -> StandIn:
    return StandIn()


def go(
    store: ResultsStore, stand: StandIn, plan: Plan | None = None, head: str = "code-2", **options
) -> SweepOutcome:
    stand.seen.clear()
    code = {"base": "code-1", "head": head}
    sides = {arm: Side(stand, lambda _, arm=arm: code[arm]) for arm in ARMS}
    return stand_in_runs.go(plan or blocks(), store, sides, **options)


def drawn(store: ResultsStore) -> list[Run]:
    """Every run in the order that the recorded plan says."""
    plan = Plan.from_document(store.read_plan("a"))
    return [(b.cell.id, b.number, arm) for b in planned_blocks(plan) for arm in b.arms]


def test_the_runs_are_made_in_the_order_that_is_drawn(store, stand) -> None:
    outcome = go(store, stand, blocks(4))
    assert stand.seen == drawn(store)
    assert len(outcome.ran) == 16
    assert outcome.failed == outcome.lost == ()
    found = complete_blocks(store.records(sweep="a"))
    assert {cell: len(of_cell) for cell, of_cell in found.items()} == {"ddp": 4, "mfsdp": 4}
    assert all(is_interleaved(block) for of_cell in found.values() for block in of_cell)
    for one in planned_blocks(Plan.from_document(store.read_plan("a"))):
        block = found[one.cell.id][one.number]
        begun = {arm: run.run_id.rpartition("/")[2] for arm, run in block.items()}
        assert tuple(sorted(begun, key=begun.__getitem__)) == one.arms


def test_without_interleave_all_of_the_first_arm_runs_before_the_second(store, stand) -> None:
    go(store, stand, blocks(interleaved=False))
    assert [arm for _, _, arm in stand.seen] == ["base"] * 4 + ["head"] * 4
    found = complete_blocks(store.records(sweep="a"))["ddp"]
    assert len(found) == 2
    assert not any(is_interleaved(block) for block in found)
    assert Plan.from_document(store.read_plan("a")).interleaved is False
    go(store, stand)  # runs made one by one are no blocks
    assert stand.seen == drawn(store)


@pytest.mark.parametrize(
    ("repeat", "head", "again"), [(2, "code-2", set()), (3, "code-2", {2}), (2, "code-3", {0, 1})]
)
def test_of_finished_blocks_those_run_again_of_which_one_arm_is_other_or_missing(
    store, stand, repeat: int, head: str, again: set[int]
) -> None:
    go(store, stand)
    outcome = go(store, stand, blocks(repeat), head)
    assert stand.seen == [run for run in drawn(store) if run[1] in again]
    assert len(outcome.done_before) == (0 if head == "code-3" else 8)
    found = complete_blocks(store.records(sweep="a"))["ddp"]
    assert [block["head"].status.code for block in found] == [head] * repeat


@pytest.mark.parametrize("fault", ["crashed", "timeout", "hang"])
def test_a_block_lost_to_a_fault_is_repeated_as_a_whole(store, stand, fault: str) -> None:
    go(store, stand)
    order = [run for run in drawn(store) if run[:2] == ("ddp", 1)]
    stand.ends[order[-1]] = [fault]
    outcome = go(store, stand, force=True)
    assert [run for run in stand.seen if run[:2] == ("ddp", 1)] == order * 2
    assert outcome.failed == ()
    assert [run.arm for run in outcome.lost] == [arm for _, _, arm in order]
    # The lost attempt stays as a record, and does not count.
    records = [one for one in store.records(sweep="a") if one.status.cell == "ddp"]
    states = Counter((r.status.attempt, r.status.state) for r in records if r.status.repeat == 1)
    assert (states[2, fault], states[3, "ok"]) == (1, 2)
    found = complete_blocks(records)["ddp"]
    assert [{one.status.attempt for one in block.values()} for block in found] == [{2}, {3}]


def test_retries_are_bounded_and_the_rest_of_the_cell_is_given_up(store, stand) -> None:
    stand.ends["ddp", 0, "head"] = ["crashed"] * 9
    events = []
    outcome = go(store, stand, block_retries=1, publish=events.append)
    assert Counter(stand.seen)["ddp", 0, "head"] == 2
    assert not [run for run in stand.seen if run[:2] == ("ddp", 1)]
    assert [(run.cell, run.arm, run.state) for run in outcome.failed] == [
        ("ddp", "head", "crashed")
    ]
    assert outcome.not_started == 2
    assert [event.again for event in events if isinstance(event, BlockLost)] == [True, False]
    assert len(complete_blocks(store.records(sweep="a"))["mfsdp"]) == 2
    # It is not started again unasked.
    outcome = go(store, stand, blocks(1), block_retries=1)
    assert stand.seen == []
    assert [run.state for run in outcome.failed_before] == ["crashed"]
    go(store, stand, blocks(1), block_retries=2)
    assert Counter(stand.seen)["ddp", 0, "head"] == 1


@pytest.mark.parametrize("state", ["out_of_memory", "unsupported"])
def test_what_would_fail_again_is_not_repeated_unless_asked(store, stand, state: str) -> None:
    stand.ends["ddp", 0, "head"] = [state]
    outcome = go(store, stand, blocks(1))
    assert Counter(stand.seen)["ddp", 0, "head"] == 1
    assert [run.state for run in outcome.failed] == [state]
    outcome = go(store, stand, blocks(1))
    assert stand.seen == []
    assert [run.state for run in outcome.failed_before] == [state]
    assert go(store, stand, blocks(1), retry_failed=True).failed == ()
    assert len(complete_blocks(store.records(sweep="a"))["ddp"]) == 1


def test_stop_in_the_middle_of_a_block_loses_the_block(store, stand) -> None:
    stop = threading.Event()
    go(store, stand, blocks(1))
    second = drawn(store)[1]
    stand.during = lambda run, event: event.set() if run == second else None
    outcome = go(store, stand, blocks(1), force=True, stop=stop)
    assert outcome.interrupted
    assert stand.seen == drawn(store)[:2]
    assert [run.state for run in outcome.ran] == ["interrupted"]
    assert len(outcome.lost) == 1


def test_resume_runs_only_the_missing_blocks_and_all_of_each(store, stand) -> None:
    stop = threading.Event()
    stand.during = lambda _, event: event.set() if len(stand.seen) == 4 else None
    go(store, stand, stop=stop)
    stand.during = lambda *_: None
    outcome = go(store, stand)
    assert stand.seen == drawn(store)[2:]
    assert len(outcome.done_before) == 2
    found = complete_blocks(store.records(sweep="a"))
    assert {cell: len(of_cell) for cell, of_cell in found.items()} == {"ddp": 2, "mfsdp": 2}


@pytest.mark.parametrize(
    ("arm", "file"), [("base", "status.json"), ("head", "env.json"), ("head", "steps.node0.jsonl")]
)
def test_a_damaged_record_makes_its_whole_block_run_again(
    store, stand, arm: str, file: str
) -> None:
    go(store, stand)
    record = next(r for r in store.records(sweep="a") if r.status.arm == arm)
    path = store.root / "runs" / record.run_id / file
    path.write_bytes(path.read_bytes()[:-20])
    go(store, stand)
    assert {run[:2] for run in stand.seen} == {(record.status.cell, record.status.repeat)}
    assert sorted(run[2] for run in stand.seen) == ["base", "head"]


def test_runs_of_blocks_of_one_arm_stand_for_it(store, stand) -> None:
    plan = replace(blocks(), arms=blocks().arms[:1])
    go(store, stand, plan)
    runs, _ = store.outlines("a")
    assert len(standing_in(plan, runs)) == len(runs) == plan.runs
    go(store, stand, plan)
    assert stand.seen == []


def test_an_arm_whose_code_changed_meanwhile_stops_the_sweep(store, stand) -> None:
    stand.ends["ddp", 0, "head"] = ["wrong code"]
    events = []
    outcome = go(store, stand, publish=events.append)
    assert {run[:2] for run in stand.seen} == {("ddp", 0)}
    assert len(outcome.failed) == 1
    remarks = [event for event in events if isinstance(event, Remark)]
    assert any("not the code that was prepared" in one.text for one in remarks)
    # It says nothing about the code that was prepared, so no retry is used up.
    assert go(store, stand, block_retries=0).failed == ()
