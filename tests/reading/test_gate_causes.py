"""One cause, one finding: verdicts grouped by the place of the code, in every form."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from recorded_runs import CELLS, Arm, judged_arms
from test_count_gate import CALLS, CAST, GATHER, WAIT, counts

from bench.derive.counts import CountRow
from reports.compare.ci import annotation_lines, to_junit
from reports.compare.judge import Verdicts
from reports.compare.text import headline, outcome_blocks, to_data, verdict_blocks
from reports.posts.pull_request import pull_request
from reports.renderers import terminal
from reports.renderers.render import render

SITE = "mfsdp_core/comm/reduce.py:AxisReduction.land"
UP = CAST.model_copy(update={"dtype": "float32>float64", "site": SITE, "line": 82, "count": 12})
BACK = UP.model_copy(update={"dtype": "float64>float32"})
LINES = CountRow(operation="python line", kind="python_line", site=SITE, line=80, count=24)
BEFORE = (CAST, GATHER, WAIT, CALLS)


def judged(store, *head: CountRow) -> Verdicts:
    before, after = counts(*BEFORE), counts(*head)
    return judged_arms(store, None, Arm(counts=before), counts=after, blocks=1, cells=CELLS)


@pytest.fixture
def added_cast(store) -> Verdicts:
    """A gradient goes through FP64 in three cells."""
    return judged(store, *BEFORE, UP, BACK, LINES)


def test_an_added_cast_is_one_finding_with_its_place_its_cells_and_its_cost(added_cast):
    assert len(added_cast.worse) == 18
    (found,) = to_data(added_cast)["causes"]
    assert (found["file"], found["line"]) == ("mfsdp_core/comm/reduce.py", 82)
    assert found["cells"] == list(CELLS)
    assert len(found["metrics"]) == 6
    assert found["milliseconds"] == pytest.approx((24 * 1e-6 + 12_000_000 / 1e9) * 1e3 / 2)
    assert found["text"] == (
        "AxisReduction.land, line 82 of mfsdp_core/comm/reduce.py: 12 casts from FP32 to FP64 and "
        "back more in all 3 cells, about 6.0 ms of a step"
    )
    assert found["text"] in headline(added_cast)


def test_the_block_of_a_pull_request_begins_with_what_regressed_and_where(added_cast, store):
    assert pull_request(store, ["gate"]).startswith(
        "### gate\n\n**Recommended: arm base, since arm head regressed.**\n\n- regressed: "
        "AxisReduction.land, line 82 of mfsdp_core/comm/reduce.py: 12 casts from FP32 to FP64 and "
        "back more in all 3 cells, about 6.0 ms of a step\n\n| run |"
    )


def test_rows_that_a_cause_explains_are_there_for_those_who_open_them(added_cast):
    text = render(outcome_blocks(added_cast))
    assert "18 rows of 1 cause" in text
    assert "copied_bytes" not in text
    assert "copied_bytes" in terminal.blocks(verdict_blocks(added_cast))
    page = render(outcome_blocks(added_cast), "md")
    assert page.index("<details><summary>18 rows of 1 cause</summary>") < page.index("copied")
    assert page.index("AxisReduction.land") < page.index("<details>")


def test_ci_counts_one_failure_and_shows_it_at_the_line_of_the_culprit(added_cast):
    suite = ET.fromstring(to_junit(added_cast)).find("testsuite")
    (case,) = (case for case in suite.iter("testcase") if case.find("failure") is not None)
    assert (case.get("classname"), case.get("name")) == ("mfsdp_core/comm/reduce.py", "line 82")
    skipped = [one.get("message") for one in suite.iter("skipped")]
    assert sum(text.endswith("see mfsdp_core/comm/reduce.py") for text in skipped) == 18
    (line,) = [one for one in annotation_lines(added_cast) if one.startswith("::error")]
    assert line.startswith("::error file=mfsdp_core/comm/reduce.py,line=82,title=regressed::Axis")


def test_two_places_are_two_causes_and_each_row_belongs_to_the_larger(store):
    other = GATHER.model_copy(update={"site": "mfsdp_core/z.py:send", "line": 3})
    found = to_data(judged(store, *BEFORE, UP, BACK, other))["causes"]
    assert [one["file"] for one in found] == ["mfsdp_core/comm/reduce.py", "mfsdp_core/z.py"]
    assert found[1]["metrics"] == ["collectives", "collective_bytes"]
    assert "8 c10d._allgather_base_ more" in found[1]["text"]


def test_what_moves_from_one_place_to_another_is_no_cause(store):
    moved = CAST.model_copy(update={"site": "mfsdp_core/new.py:gather"})
    assert to_data(judged(store, moved, GATHER, WAIT, CALLS))["causes"] == []


def test_without_a_place_a_metric_is_one_finding_over_its_cells(store):
    result = judged_arms(store, None, Arm(), slower=1.2, cells=CELLS)
    assert len(result.worse) == 3
    (found,) = to_data(result)["causes"]
    assert found["file"] is None
    assert found["text"].startswith("all 3 cells regressed: step_time +")
    (line,) = annotation_lines(result)
    assert "file=gate.yaml" in line


def test_a_rise_whose_caller_nobody_knows_is_told_by_its_metrics(store):
    found = to_data(judged(store, *BEFORE, UP.model_copy(update={"site": "", "line": 0})))["causes"]
    assert [one["file"] for one in found] == [None] * 5
    assert found[0]["text"] == "all 3 cells regressed: operations +12"
