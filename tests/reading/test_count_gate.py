"""Counts and live storage are judged exactly at n = 1: a rise names what rose and who made it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from recorded_runs import CELLS, ONE, Arm, Recorded, findings_of, judged_arms, record_arms

from bench.derive.counts import CountRow, Rates, StepCounts
from bench.derive.live_storage import LiveRow, LiveStorage
from reports.compare.baseline import make_baseline, read_baseline
from reports.compare.cause import causes
from reports.compare.judge import Verdicts, judge
from reports.compare.policy import Policy
from reports.compare.sides import samples_of, sides_of_baseline
from reports.compare.text import outcome_blocks
from reports.renderers.render import render
from reports.sections.steps import counts_section

RATES = Rates(
    copied_bytes_per_second=1e9,
    wire_bytes_per_second=1e8,
    seconds_per_operation=1e-6,
    seconds_per_call=1e-7,
)
CAST = CountRow(
    operation="aten._to_copy",
    kind="cast",
    dtype="float32>bfloat16",
    site="mfsdp_core/a.py:gather",
    line=7,
    count=4,
    bytes=6_000_000,
    allocations=4,
    allocated_bytes=2_000_000,
)
GATHER = CountRow(
    operation="c10d._allgather_base_",
    kind="collective",
    dtype="bfloat16",
    site="mfsdp_core/b.py:send",
    count=8,
    bytes=4_000_000,
)
WAIT = CountRow(operation="Work.wait", kind="wait", site="mfsdp_core/b.py:land", count=8)
CALLS = CountRow(operation="python call", kind="python_call", site="mfsdp_core/a.py", count=500)


def counts(*rows: CountRow, varying: tuple[str, ...] = ()) -> dict[str, Any]:
    found = StepCounts(ranks=2, units=3, microbatches=1, rows=rows, varying=varying, rates=RATES)
    return found.model_dump(mode="json")


def more(row: CountRow, times: int = 2) -> CountRow:
    amounts = ("count", "bytes", "allocations", "allocated_bytes", "exposed")
    return row.model_copy(update={name: times * getattr(row, name) for name in amounts})


BASE = counts(CAST, GATHER, WAIT, CALLS)


def judged(store, head: Any, base: Any = BASE, policy: Policy | None = None) -> Verdicts:
    return judged_arms(store, policy, Arm(counts=base), counts=head, blocks=1, cells=ONE)


def regressed(result: Verdicts) -> dict[str, str]:
    return {one.metric: one.reason for one in result.of("regressed")}


def test_equal_counts_pass_at_one_run_a_side_and_take_no_row_of_the_table(store):
    result = judged(store, BASE)
    assert not regressed(result)
    text = render(outcome_blocks(result))
    assert "counts: 13 of 13 are equal to the digit" in text
    assert "copied_bytes" not in text


def test_an_added_cast_fails_with_its_name_its_caller_and_its_cost(store):
    twice = CAST.model_copy(update={"site": "mfsdp_core/c.py:step", "line": 41})
    found = regressed(judged(store, counts(CAST, twice, GATHER, WAIT, CALLS)))
    assert set(found) == {
        "operations", "copies", "copied_bytes", "allocations", "allocated_bytes"
    }  # fmt: skip
    assert found["copies"] == (
        "aten._to_copy float32>bfloat16 +4 from mfsdp_core/c.py:step line 41 (+4), "
        "about 3.0 ms of a step"
    )
    assert "+6,000,000 bytes" in found["copied_bytes"]


WIDE = GATHER.model_copy(update={"dtype": "float32", "bytes": 8_000_000})


@pytest.mark.parametrize(
    ("row", "changed", "metrics", "said"),
    [
        (GATHER, more(GATHER), {"operations", "collectives", "collective_bytes"}, ""),
        (WAIT, more(WAIT), {"waits"}, ""),
        (CALLS, more(CALLS), {"python_calls"}, ""),
        (WAIT, WAIT.model_copy(update={"count": 9}), {"waits"}, "Work.wait +1 from"),
        # A wider dtype is more bytes of as many collectives; a wait may be exposed anew.
        (GATHER, WIDE, {"collective_bytes"}, "c10d._allgather_base_ float32 +8,000,000 bytes"),
        (WAIT, WAIT.model_copy(update={"exposed": 8}), {"exposed_waits"}, ""),
    ],
)
def test_every_kind_fails_in_its_own_metrics(store, row, changed, metrics, said):
    rows = [changed if one is row else one for one in (CAST, GATHER, WAIT, CALLS)]
    found = regressed(judged(store, counts(*rows)))
    assert set(found) == metrics
    assert said in "".join(found.values())


def test_fewer_is_an_improvement(store):
    result = judged(store, counts(GATHER, WAIT, CALLS))
    assert not regressed(result)
    assert {one.metric for one in result.of("improved")} >= {"copies", "copied_bytes"}


@pytest.mark.parametrize(
    ("times", "regresses", "said"),
    [
        (2, False, "+4 of aten._to_copy float32>bfloat16 allowed (weights are cast)"),
        (3, True, "+4 beyond the +4 that is allowed"),
    ],
)
def test_a_rise_that_the_policy_names_passes_and_no_more_than_it_names(
    store, policy, times, regresses, said
):
    text = (
        "allow:\n"
        "  - {operation: aten._to_copy float32>bfloat16, count: 4, reason: weights are cast}\n"
        "  - {operation: aten.cat int8, count: 4, reason: nobody needs it}\n"
    )
    rows = counts(more(CAST, times), GATHER, WAIT, CALLS)
    result = judged(store, rows, policy=policy(text))
    assert ("copies" in regressed(result)) == regresses
    (copies,) = result.of_metric("copies")
    assert (copies.base, copies.head) == (4, 4 * times)
    assert said in copies.reason
    assert result.notes == ("the policy allows more of aten.cat int8, and no cell does more of it",)


def test_counts_that_vary_from_step_to_step_decide_nothing(store):
    rows = counts(more(CAST), GATHER, WAIT, CALLS, varying=("aten._to_copy at a",))
    result = judged(store, rows)
    assert not regressed(result)
    assert {one.metric for one in result.of("inconclusive")} >= {"copies"}


@pytest.mark.parametrize(
    ("head", "text", "copies"),
    [
        (BASE, "", [("unmeasured", False, "base has no counts")]),
        (None, "", []),  # no row unless the policy asks for one
        (None, "metrics:\n  copies: {gate: required}\n", [("unmeasured", True, "")]),
    ],
)
def test_a_side_without_counts_is_named(store, policy, head, text, copies):
    result = judged(store, head, None, policy=policy(text) if text else None)
    found = result.of_metric("copies")
    assert [(one.verdict, one.required) for one in found] == [one[:2] for one in copies]
    assert all(words in one.reason for one, (_, _, words) in zip(found, copies, strict=True))


def test_a_report_says_what_a_step_does_where_it_was_counted(store):
    cells = {"counted": Recorded(CELLS["zero3"], counts=BASE), "plain": Recorded(CELLS["ddp"])}
    (table,) = (block.table for block in counts_section(findings_of(store, cells)))
    assert [(row.cells[0], row.cells[-1]) for row in table.rows] == [("counted", "83.33")]


def test_a_baseline_keeps_counts_in_few_lines_and_fails_by_name(store):
    record_arms(store, {None: Arm(counts=BASE)}, blocks=1, cells=ONE, sweep="before")
    now = "2026-03-01T10:00:00.000Z"
    cells = samples_of(store, "before")
    text = make_baseline("main", "before", now, cells).to_text()
    assert '"aten._to_copy float32>bfloat16": [4, 6000000, 4, 2000000, 0]' in text
    kept = read_baseline(json.loads(text), "main.json")
    twice = counts(more(CAST), GATHER, WAIT, CALLS)
    record_arms(store, {None: Arm(counts=twice)}, blocks=1, cells=ONE, sweep="after")
    sides = sides_of_baseline(store, "main", kept.cells, "after")
    found = regressed(judge(sides))
    assert "aten._to_copy float32>bfloat16 +4 from mfsdp_core/a.py:gather" in found["copies"]


BUFFERS = LiveRow(site="mfsdp_core/memory/a.py:acquire", line=7, bytes=8_000, storages=4)
TABLES = LiveRow(site="bench/models/llama.py:f", line=1, bytes=600, storages=1)
KEPT = LiveRow(site="mfsdp_core/runtime/b.py:adopt", line=161, bytes=2048, storages=2)


def live(*rows: LiveRow) -> dict[str, Any]:
    size = sum(row.bytes for row in rows) // 2
    found = LiveStorage(step=2, bytes=(size, size), rows=rows)
    return found.model_dump(mode="json")


HELD = live(BUFFERS, TABLES)


@pytest.mark.parametrize(
    ("base", "head", "expected"),
    [
        (HELD, HELD, {"live_storage": "equivalent"}),
        # Older records say nothing of it and are not asked; damaged accounts are none.
        *((none, none, {}) for none in (None, "text", {"step": 2, "bytes": []}, {"step": 2})),
    ],
)
def test_storage_is_judged_to_the_byte(store, base, head, expected):
    result = judged_arms(store, None, Arm(live=base), live=head, blocks=1, cells=ONE)
    found = {j.metric: j.verdict for j in result.judgements if j.metric == "live_storage"}
    assert found == expected
    assert not result.failed


def test_storage_that_is_kept_fails_with_its_maker(store):
    result = judged_arms(
        store, None, Arm(live=HELD), live=live(BUFFERS, TABLES, KEPT), blocks=1, cells=ONE
    )
    reasons = {one.metric: one.reason for one in result.of("regressed")}
    where = "over all ranks +2.0 KiB from mfsdp_core/runtime/b.py:adopt line 161"
    assert reasons == {"live_storage": where}


def test_storage_that_moves_to_another_place_is_no_rise_of_that_place(store):
    """As between two engines, of which each holds its own."""
    moved = KEPT.model_copy(update={"bytes": BUFFERS.bytes + 100})
    result = judged_arms(store, None, Arm(live=HELD), live=live(TABLES, moved), blocks=1, cells=ONE)
    (row,) = result.of("regressed")
    assert row.reason.endswith("b.py:adopt line 161, -7.8 KiB from others")
    assert not [cause.text for cause in causes(result) if "adopt" in cause.text]
