"""Which runs are paired: whole blocks of one attempt, of the newest configuration and code."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import pytest
from recorded_runs import in_memory, resolved_run, sample

from bench.derive.blocks import complete_blocks, is_interleaved
from bench.record import RunRecord, RunStatus

RESOLVED = resolved_run()
SAMPLES = [sample(step) for step in range(1, 21)]
_clock = count()


def run(
    arm: str | None,
    repeat: int = 0,
    *,
    attempt: int | None = 1,
    state: str = "ok",
    code: str | None = None,
    cell: str = "a",
    resolved=RESOLVED,
) -> RunRecord:
    """The next run, younger than all before it."""
    start = f"2026-01-01T00:00:{next(_clock):09.3f}Z"
    status = RunStatus(
        state=state,
        cell=cell,
        arm=arm,
        repeat=repeat,
        attempt=attempt,
        code=code or f"code of {arm}",
        started_utc=start,
    )
    made = in_memory({0: SAMPLES, 1: SAMPLES}, resolved=resolved, status=status)
    return replace(made, run_id=f"{resolved.slug}/{start}")


def ids(blocks) -> list[dict[str, str]]:
    return [{arm: record.run_id for arm, record in block.items()} for block in blocks]


def test_a_block_holds_one_run_of_every_arm() -> None:
    base, head = run("base"), run("head")
    assert complete_blocks([base, head]) == {"a": [{"base": base, "head": head}]}


def test_blocks_come_in_the_order_of_their_numbers() -> None:
    runs = [run(arm, repeat) for repeat in (2, 0, 1) for arm in ("base", "head")]
    blocks = complete_blocks(runs)["a"]
    assert [block["base"].status.repeat for block in blocks] == [0, 1, 2]


def test_the_order_of_the_records_does_not_matter() -> None:
    runs = [run(arm, repeat, attempt=attempt) for attempt in (1, 2) for repeat in range(3)
            for arm in ("base", "head")]  # fmt: skip
    expected = ids(complete_blocks(runs)["a"])
    shuffled = random.Random(3).sample(runs, len(runs))
    assert ids(complete_blocks(shuffled)["a"]) == expected


@pytest.mark.parametrize("state", ["crashed", "timeout", "hang", "interrupted", "out_of_memory"])
def test_a_block_with_a_failed_arm_does_not_count(state: str) -> None:
    runs = [run("base", 0), run("head", 0, state=state), run("base", 1), run("head", 1)]
    blocks = complete_blocks(runs)["a"]
    assert [block["head"].status.repeat for block in blocks] == [1]


DAMAGED = {"problems": ("steps.rank1.jsonl: cut off",)}
SHORT = {"steps": {0: list(SAMPLES), 1: list(SAMPLES[:-1])}}


@pytest.mark.parametrize(
    ("changes", "state", "blocks"),
    [(DAMAGED, "ok", 0), (SHORT, "ok", 0), ({}, "unstable", 1), (None, "ok", 0)],
    ids=["damaged", "short", "unsteady", "missing"],
)
def test_a_block_needs_a_whole_record_of_every_arm_steady_or_not(changes, state, blocks) -> None:
    head = [] if changes is None else [replace(run("head", state=state), **changes)]
    other = [run("base", 1), run("head", 1)]
    assert len(complete_blocks([run("base"), *head, *other])["a"]) == blocks + 1


def test_runs_of_different_attempts_are_never_paired() -> None:
    first = [run("base"), run("head", state="crashed")]
    second = [run("head", attempt=2), run("base", attempt=2, state="interrupted")]
    assert complete_blocks([*first, *second])["a"] == []


def test_the_newest_complete_attempt_counts() -> None:
    first = [run("base"), run("head")]
    second = [run("base", attempt=2), run("head", attempt=2)]
    third = [run("base", attempt=3), run("head", attempt=3, state="crashed")]
    (block,) = complete_blocks([*first, *second, *third])["a"]
    assert {record.status.attempt for record in block.values()} == {2}


@pytest.mark.parametrize(
    "older", [{"code": "old"}, {"resolved": resolved_run(dtype="bf16", comm="bf16")}]
)
def test_blocks_of_older_code_or_of_an_older_configuration_are_left_out(older) -> None:
    old = [run(arm, repeat, **older) for repeat in range(3) for arm in ("base", "head")]
    new = [run(arm, 1, attempt=2) for arm in ("base", "head")]
    (block,) = complete_blocks([*old, *new])["a"]
    assert block["head"].status.code == "code of head"
    assert block["base"].resolved == RESOLVED


def test_an_unfinished_block_of_newer_code_does_not_hide_the_older_ones() -> None:
    old = [run(arm, repeat, code="old") for repeat in range(3) for arm in ("base", "head")]
    assert len(complete_blocks([*old, run("base", 0, attempt=2)])["a"]) == 3


def test_cells_do_not_mix_and_runs_without_an_arm_are_ignored() -> None:
    runs = [run("base", cell="a"), run("head", cell="b"), run(None, cell="c", attempt=None)]
    assert complete_blocks(runs, ["base", "head"]) == {"a": [], "b": []}


def test_named_arms_leave_others_out() -> None:
    runs = [run("base"), run("head"), run("third", state="crashed")]
    assert complete_blocks(runs)["a"] == []
    assert [set(block) for block in complete_blocks(runs, ["base", "head"])["a"]] == [
        {"base", "head"}
    ]


def test_runs_outside_interleaved_blocks_are_paired_by_repeat_and_say_so() -> None:
    runs = [run(arm, repeat, attempt=None) for arm in ("base", "head") for repeat in range(2)]
    blocks = complete_blocks(runs)["a"]
    assert len(blocks) == 2
    assert not any(is_interleaved(block) for block in blocks)


def test_interleaved_runs_are_not_paired_with_others() -> None:
    assert complete_blocks([run("base", attempt=None), run("head", attempt=1)])["a"] == []
