"""The order of interleaved arms: every block whole, drawn once, no arm is first too often."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from stand_in_runs import plan_of

from sweeps.blocks import arm_order, planned_blocks
from sweeps.plan import Plan

SWEEP = """\
name: a
matrix:
  product: {engine.name: [ddp, fsdp2, mfsdp]}
"""

names = st.lists(st.text("abcdefgh", min_size=1, max_size=5), min_size=2, max_size=5, unique=True)
sweeps = st.text("abc", max_size=9)
blocks = st.integers(0, 10_000)


def plan_with(arms, repeat: int = 4) -> Plan:
    return plan_of(SWEEP, tuple(arms), repeat=repeat)


@given(names, sweeps, blocks)
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
    former = plan_of(SWEEP)
    document = former.to_document()
    for key in ("arms", "interleaved"):
        del document[key]
    assert Plan.from_document(document) == former
