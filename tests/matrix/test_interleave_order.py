"""The order of interleaved arms: every block whole, the seed decides, no arm is first too often."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.resolve import Machine
from sweeps.blocks import arm_order, planned_blocks
from sweeps.definition import parse_sweep
from sweeps.plan import Plan, PlannedArm
from sweeps.planning import make_plan

LAPTOP = Machine(cpu_count=2, memory_bytes=16 * 2**30)
SWEEP = """\
name: a
matrix:
  product: {engine.name: [ddp, fsdp2, mfsdp]}
"""

names = st.lists(st.text("abcdefgh", min_size=1, max_size=5), min_size=2, max_size=5, unique=True)
seeds = st.integers(0, 2**31 - 1)
blocks = st.integers(0, 10_000)


def plan_with(arms, *, seed: int = 7, repeat: int = 4) -> Plan:
    from dataclasses import replace

    planned = tuple(PlannedArm(name, "", None, None, "2.13.0", "3.11.7") for name in arms)
    plan = make_plan(parse_sweep(SWEEP), LAPTOP, repeat=repeat)
    return replace(plan, arms=planned, interleaved=True, seed=seed)


@given(names, seeds, blocks)
def test_each_block_holds_each_arm_once(arms, seed: int, block: int) -> None:
    assert sorted(arm_order(arms, seed=seed, cell="c", block=block)) == sorted(arms)


@given(names, seeds, blocks)
def test_a_seed_gives_the_same_order_again(arms, seed: int, block: int) -> None:
    order = arm_order(arms, seed=seed, cell="c", block=block)
    assert arm_order(arms, seed=seed, cell="c", block=block) == order


@given(names, seeds, st.integers(1, 60))
def test_after_any_number_of_blocks_no_arm_was_first_more_than_once_more_than_another(
    arms, seed: int, count: int
) -> None:
    firsts = Counter(arm_order(arms, seed=seed, cell="c", block=n)[0] for n in range(count))
    starts = [firsts[arm] for arm in arms]
    assert max(starts) - min(starts) <= 1


def test_the_first_arm_of_a_block_is_drawn_and_not_fixed() -> None:
    firsts = Counter(arm_order("ab", seed=seed, cell="c", block=0)[0] for seed in range(2000))
    assert 900 < firsts["a"] < 1100


def test_every_order_of_three_arms_is_drawn_equally_often() -> None:
    drawn = Counter(
        arm_order("abc", seed=seed, cell="c", block=block)
        for seed in range(400)
        for block in range(6)
    )
    assert set(drawn) == set(permutations("abc"))
    assert all(320 < count < 480 for count in drawn.values())


def test_the_order_differs_between_seeds_and_between_cells() -> None:
    def orders(seed: int, cell: str) -> list[tuple[str, ...]]:
        return [arm_order("ab", seed=seed, cell=cell, block=n) for n in range(40)]

    assert orders(1, "x") != orders(2, "x")
    assert orders(1, "x") != orders(1, "y")


@pytest.mark.parametrize("more", [1, 5])
def test_more_blocks_do_not_change_the_order_of_the_earlier_ones(more: int) -> None:
    few = {(b.cell.id, b.number): b.arms for b in planned_blocks(plan_with("ab", repeat=4))}
    many = {(b.cell.id, b.number): b.arms for b in planned_blocks(plan_with("ab", repeat=4 + more))}
    assert few.items() <= many.items()


def test_the_blocks_of_one_cell_are_spread_over_the_whole_sweep() -> None:
    order = [(block.number, block.cell.id) for block in planned_blocks(plan_with("ab", repeat=2))]
    assert order == [(n, cell) for n in range(2) for cell in ("ddp", "fsdp2", "mfsdp")]


def test_a_selection_keeps_the_order_of_its_blocks() -> None:
    plan = plan_with("ab", repeat=8)
    whole = [b.arms for b in planned_blocks(plan) if b.cell.id == "fsdp2"]
    assert [b.arms for b in planned_blocks(plan.selected(["fsdp2"]))] == whole


def test_arms_and_seed_survive_plan_json() -> None:
    plan = plan_with("ab", seed=11)
    read = Plan.from_document(plan.to_document())
    assert read == plan
    assert [b.arms for b in planned_blocks(read)] == [b.arms for b in planned_blocks(plan)]


def test_a_plan_from_before_there_were_arms_can_be_read() -> None:
    plan = make_plan(parse_sweep(SWEEP), LAPTOP)
    document = plan.to_document()
    for key in ("arms", "interleaved", "seed"):
        del document[key]
    assert Plan.from_document(document) == plan
