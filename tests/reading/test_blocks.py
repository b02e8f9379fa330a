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
OTHER = resolved_run(dtype="bf16", comm="bf16")
SAMPLES = [sample(step) for step in range(1, 21)]
_clock = count()


def run(arm: str | None, repeat: int = 0, *, resolved=RESOLVED, **changes) -> RunRecord:
    """The next run, younger than all before it."""
    start = f"2026-01-01T00:00:{next(_clock):09.3f}Z"
    plain = {"state": "ok", "cell": "a", "attempt": 1, "code": f"code of {arm}"}
    status = RunStatus(arm=arm, repeat=repeat, started_utc=start, **{**plain, **changes})
    made = in_memory({0: SAMPLES, 1: SAMPLES}, resolved=resolved, status=status)
    return replace(made, run_id=f"{resolved.slug}/{start}")


def pair(repeat: int = 0, attempt: int | None = 1, head: str = "ok", **changes) -> list[RunRecord]:
    """A run of each arm. head: how the second ends."""
    made = {"repeat": repeat, "attempt": attempt, **changes}
    return [run("base", **made), run("head", state=head, **made)]


DAMAGED = {"problems": ("steps.rank1.jsonl: cut off",)}
SHORT = {"steps": {0: list(SAMPLES), 1: list(SAMPLES[:-1])}}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([*pair(2), *pair(0), *pair(1)], [(0, 1), (1, 1), (2, 1)]),
        # A block needs a whole record of every arm, steady or not.
        *(
            ([*pair(0, head=state), *pair(1)], [(1, 1)])
            for state in ("crashed", "timeout", "hang", "interrupted", "out_of_memory")
        ),
        ([*pair(0, head="unstable"), *pair(1)], [(0, 1), (1, 1)]),
        ([run("base"), *pair(1)], [(1, 1)]),
        ([run("base"), replace(run("head"), **DAMAGED), *pair(1)], [(1, 1)]),
        ([run("base"), replace(run("head"), **SHORT), *pair(1)], [(1, 1)]),
        # Attempts are never mixed, and the newest that is complete counts.
        ([run("base"), run("head", attempt=2)], []),
        ([*pair(), *pair(attempt=2), *pair(attempt=3, head="crashed")], [(0, 2)]),
        ([run("base", attempt=None), run("head")], []),
        # Older code and older configurations are left out, if a newer block is complete.
        ([*pair(0, code="old"), *pair(1, code="old"), *pair(1, 2)], [(1, 2)]),
        ([*pair(0, resolved=OTHER), *pair(1, resolved=OTHER), *pair(1, 2)], [(1, 2)]),
        ([*pair(0, code="old"), *pair(1, code="old"), run("base", 0, attempt=2)], [(0, 1), (1, 1)]),
    ],
)
def test_a_block_is_one_whole_attempt_of_every_arm(runs, expected) -> None:
    for order in (runs, random.Random(3).sample(runs, len(runs))):
        found = complete_blocks(order)["a"]
        of_block = [{(r.status.repeat, r.status.attempt) for r in one.values()} for one in found]
        assert of_block == [{one} for one in expected]
        assert all(
            {arm: record.status.arm for arm, record in block.items()}
            == {"base": "base", "head": "head"}
            for block in found
        )


def test_cells_do_not_mix_and_runs_without_an_arm_are_ignored() -> None:
    runs = [run("base", cell="a"), run("head", cell="b"), run(None, cell="c", attempt=None)]
    assert complete_blocks(runs, ["base", "head"]) == {"a": [], "b": []}


def test_named_arms_leave_others_out() -> None:
    runs = [*pair(), run("third", state="crashed")]
    assert complete_blocks(runs)["a"] == []
    assert [set(block) for block in complete_blocks(runs, ["base", "head"])["a"]] == [
        {"base", "head"}
    ]


def test_runs_outside_interleaved_blocks_are_paired_by_repeat_and_say_so() -> None:
    blocks = complete_blocks([*pair(0, None), *pair(1, None)])["a"]
    assert [is_interleaved(block) for block in blocks] == [False, False]
