"""Which runs a gate compares, what it refuses, and what it hands to people and CI systems."""

from __future__ import annotations

import json
import math
import re
import shutil
from xml.etree import ElementTree as ET

import pytest
from recorded_runs import CELLS, ONE, Arm, judged_arms, keep_changes, on_nodes, record_arms

from bench.derive.metrics import CPU_TIME, STEP_TIME, MetricRule, default_rules
from bench.errors import UsageError
from bench.store import ResultsStore
from reports.compare import ci
from reports.compare.judge import Verdicts, judge
from reports.compare.policy import Policy
from reports.compare.sides import cells_of, sides_of_arms, sides_of_sweeps
from reports.compare.text import headline, outcome_blocks
from reports.renderers.render import render
from reports.views.no_number import NOT_RUN

OTHER = {"cpu_name": "Another CPU"}


def judged(sides, **rules: MetricRule) -> Verdicts:
    return judge(sides, Policy({**default_rules(), **rules}))


@pytest.fixture(scope="module")
def slower(tmp_path_factory) -> Verdicts:
    """Three cells, of which the head takes 10 % longer."""
    store = ResultsStore.open(tmp_path_factory.mktemp("slower") / "results", create=True)
    return judged_arms(store, slower=1.1, noise=0.003)


@pytest.mark.parametrize(
    ("time", "arms", "begins"),
    [
        ("advisory", {"blocks": 1, "slower": 2.2}, "PASSED, time not decided: "),
        ("advisory", {"blocks": 12}, "PASSED: "),
        ("off", {"blocks": 1}, "PASSED: "),  # without times nothing is said of them
        ("advisory", {"blocks": 1, "states": {0: "crashed"}}, "FAILED TO MEASURE"),
    ],
)
def test_the_first_line_says_what_was_not_decided_beside_what_was(store, time, arms, begins):
    rules = {**default_rules(), "step_time": MetricRule(time, 0.02, "lower_is_better")}
    assert headline(judged_arms(store, Policy(rules=rules), **arms)).startswith(begins)


def test_runs_on_a_device_that_did_not_stay_as_it_was_have_no_time_and_the_gate_says_why(store):
    caps = {"before": {"power_cap_watts": 700}, "after": {"power_cap_watts": 500}}
    moved = {"runtime": {"devices": [{"source": "nvml", **caps}], "device_names": []}}
    result = judged_arms(store, hardware=moved, blocks=2)
    times = result.of_metric("step_time")
    assert {one.verdict for one in times} == {"unmeasured"}
    assert "2 head runs are not steady" in times[0].reason
    assert times[0].reason.endswith("had its power cap changed from 700 to 500 W during the run")
    assert {one.verdict for one in result.of_metric("loss")} != {"unmeasured"}


def test_a_part_of_the_cells_can_be_judged_alone(store):
    record_arms(store, {"base": Arm(), "head": Arm(slower=1.1, states={0: "crashed"})}, blocks=1)
    sides = sides_of_arms(store, "gate")
    assert [name for name, _ in sides.selected(["zero*"]).failed] == ["zero1", "zero3"]
    assert sides.selected(["zero*"]).pruned == ()
    with pytest.raises(UsageError, match="--only fsdp3: no such cell; expected ddp, zero1, zero3"):
        sides.selected(["ddp", "fsdp3"])
    both = sides_of_sweeps(store, "gate:ddp [base]", "gate:ddp [base]")
    for named in ("ddp [[]base]", "ddp [base]", "ddp*"):
        assert [one.label for one in both.selected([named]).pairs] == ["ddp [base]"]


def test_a_side_of_which_every_run_is_damaged_says_so(store):
    record_arms(store, {"base": Arm(), "head": Arm()}, blocks=1)
    for record in store.records(sweep="gate"):
        if record.status.arm == "head":
            _, folder = store.find(record.run_id)
            next(folder.glob("steps.*")).write_text("")
    keep_changes(store)
    failed = dict(sides_of_arms(store, "gate", "base", "head").failed)
    assert set(failed) == set(CELLS)
    assert {*failed.values()} == {"no complete block (head: damaged: no samples of rank 0, 1)"}


def test_a_number_that_is_none_is_not_measured(store):
    sides = judged_arms(store, blocks=1, cpu_noise=math.nan).sides
    assert all(pair.head.of(STEP_TIME) and not pair.head.of(CPU_TIME) for pair in sides.pairs)


def test_arms_are_base_and_head_or_the_first_two_or_named(store):
    record_arms(store, {"old": Arm(), "new": Arm(slower=1.1), "third": Arm()}, blocks=2)
    assert sides_of_arms(store, "gate").head == "gate [new]"
    assert sides_of_arms(store, "gate", "third", "old").base == "gate [third]"
    assert sides_of_arms(store, "gate", None, "old").base == "gate [new]"
    assert [cell.name for cell in cells_of(store, "gate", "new")] == list(CELLS)
    assert [cell.name for cell in cells_of(store, "gate:ddp [old]", None)] == ["ddp [old]"]
    record_arms(store, {None: Arm()}, sweep="plain", blocks=1)
    for asked, message in (
        (lambda: sides_of_arms(store, "gate", "old", "old"), "both arm 'old'"),
        (lambda: sides_of_arms(store, "plain"), "has 0 arms; .* needs two"),
        (lambda: cells_of(store, "gate"), "arms old, new, third; name one of them"),
    ):
        with pytest.raises(UsageError, match=message):
            asked()


def test_interleaved_arms_are_paired_and_two_sweeps_and_other_arms_are_not(store, slower):
    assert all(pair.paired for pair in slower.sides.pairs)
    times = [(j.cell, j.verdict) for j in slower.judgements if j.metric == "step_time"]
    assert times == [(cell, "regressed") for cell in CELLS]
    record_arms(store, {None: Arm()}, sweep="before", noise=0.003)
    record_arms(store, {None: Arm(slower=1.1)}, sweep="after", noise=0.003)
    for result in (
        judged(sides_of_sweeps(store, "before", "after")),
        judged_arms(store, slower=1.1, noise=0.003, interleaved=False),
    ):
        assert result.regressed
        assert not any(pair.paired for pair in result.sides.pairs)
        assert "3 comparisons of runs that were not interleaved" in render(outcome_blocks(result))


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (Arm(), Arm(hardware=OTHER), "Another CPU"),
        (on_nodes("n1", "n2"), on_nodes("n1", "n3"), "nodes differ: n1, n2 and n1, n3"),
        (on_nodes("n1", "n2"), on_nodes("n2", "n1"), None),
    ],
)
def test_other_hardware_and_other_nodes_are_refused_cell_by_cell(store, before, after, why):
    for sweep, arm in (("before", before), ("after", after)):
        record_arms(store, {None: arm}, sweep=sweep, blocks=2)
    sides = sides_of_sweeps(store, "before", "after")
    result = judged(sides)
    assert result.nothing_comparable == (why is not None)
    if why is not None:
        assert headline(result).startswith("not comparable: ")
        assert why in headline(result)
        assert why in dict(result.sides.not_comparable)["ddp"]
        told = judge(sides, any_nodes=True)
        assert bool(told.sides.pairs) == why.startswith("nodes")


def test_a_planned_cell_that_has_not_run_has_failed(store):
    record_arms(store, {"base": Arm(), "head": Arm()}, cells={"ddp": CELLS["ddp"]})
    plan = store.read_plan("gate")
    plan["cells"].append(plan["cells"][0] | {"id": "more", "config_hash": "0" * 12})
    store.write_plan("gate", plan)
    result = judged(sides_of_arms(store, "gate"))
    assert result.failed
    assert result.sides.failed == (("more", "it was planned and has not run"),)


def test_bytes_that_one_engine_does_not_count_are_passed_over_unless_they_are_asked_for(store):
    single = {"single": CELLS["ddp"].model_copy(update={"engine": CELLS["ddp"].engine})}
    record_arms(store, {"base": Arm(), "head": Arm()}, cells=single)
    for file in store.root.glob("runs/*/*/steps.node*.jsonl"):
        file.write_text(re.sub(r'"wire_bytes": \d+', '"wire_bytes": null', file.read_text()))
    keep_changes(store)
    sides = sides_of_arms(store, "gate")
    assert not judged(sides).failed
    asked = judged(sides, wire_bytes=MetricRule("required", 0.0, "lower_is_better", named=True))
    assert asked.failed
    assert "FAILED TO MEASURE: 1 unmeasured" in headline(asked)


def test_a_resident_set_is_not_held_to_half_a_per_cent(store):
    record_arms(store, {"base": Arm(), "head": Arm()}, cells={"ddp": CELLS["ddp"]})
    for file in store.root.glob("runs/*/*/memory.json"):
        file.unlink()
    keep_changes(store)
    memory = judged(sides_of_arms(store, "gate")).of_metric("memory")
    assert [(j.detail, j.tolerance) for j in memory] == [("RSS peak", 0.05)]


def test_the_three_numbers_of_speed_are_always_together(slower):
    for text in (render(outcome_blocks(slower)), render(outcome_blocks(slower), "md")):
        for name in ("time change", "throughput change", "throughput ratio"):
            assert f"{name}: head" in text
    for case in ET.fromstring(ci.to_junit(slower)).iter("testcase"):
        if case.get("name") == "step_time":
            text = case.find("failure").get("message")
            assert "time change +" in text
            assert "throughput change -" in text
            assert "throughput ratio 0." in text


def test_junit_has_a_case_per_cell_and_metric_and_skips_what_was_pruned(slower):
    suite = ET.fromstring(ci.to_junit(slower)).find("testsuite")
    cases = {(c.get("classname"), c.get("name")): c for c in suite.iter("testcase")}
    assert len(cases) == 3 * 5 + 1
    assert cases["ddp", "step_time"].find("failure") is not None
    assert cases["ddp", "memory"].find("failure") is None
    assert "too-few-devices" in cases["cuda", "pruned"].find("skipped").get("message")
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("3", "0", "1")


@pytest.mark.parametrize(
    ("head", "strict", "failures", "errors", "annotated"),
    [
        ({"slower": 1.3, "blocks": 3}, False, "0", "0", {"::warning"}),  # undecided: skipped
        ({"slower": 1.3, "blocks": 3}, True, "3", "0", {"::warning"}),
        # Cells without a number.
        ({"states": {0: "hang"}, "blocks": 1}, False, "0", "3", {"::error"}),
    ],
)
def test_undecided_and_unmeasured_cells_are_told_apart(
    store, head, strict, failures, errors, annotated
):
    result = judged_arms(store, **head)
    found = ET.fromstring(ci.to_junit(result, strict=strict))
    assert (found.get("failures"), found.get("errors")) == (failures, errors)
    assert {line.split(" ")[0] for line in ci.annotation_lines(result)} == annotated


def test_hostile_names_are_shown_and_never_obeyed(store):
    cells = {"100%,a:b\n::error::x <b>|@all": CELLS["ddp"]}
    result = judged_arms(store, slower=1.2, cells=cells)
    (line,) = ci.annotation_lines(result)
    assert line.startswith("::error file=gate.yaml,title=step_time regressed::100%25,a:b ")
    assert "\n" not in line
    assert not re.search("<b>|@all", render(outcome_blocks(result), "md"))


def test_a_summary_stays_within_what_github_accepts():
    long = "| row |\n" * 200_000
    cut = ci.summary(long)
    assert len(cut.encode()) <= 1024 * 1024
    assert cut.endswith("(cut off)\n")
    assert ci.summary("short") == "short"
    assert len(ci.summary(long, 1024 * 1024)) < 20


@pytest.mark.parametrize("how", ["deleted", "another arm"])
def test_a_planned_run_without_its_record_fails_its_cell_and_is_named(store, how):
    record_arms(store, {"base": Arm(), "head": Arm()}, cells=ONE)
    (folder,) = (
        path
        for _, path, status in store.statuses("gate")
        if (status.repeat, status.arm) == (7, "head")
    )
    if how == "deleted":
        shutil.rmtree(folder)
    else:
        status = json.loads((folder / "status.json").read_text())
        (folder / "status.json").write_text(json.dumps(status | {"arm": "base"}))
    found = judge(sides_of_arms(store, "gate"))
    why = f"head: {NOT_RUN}" if how == "deleted" else "base: damaged: status.json was changed"
    assert [(cell, why in text) for cell, text in found.sides.failed] == [("zero3", True)]
    assert found.sides.failed[0][1].startswith("block 7: ")
    assert found.failed


def test_a_planned_repeat_without_its_record_fails_its_cell_and_is_named(store):
    for sweep in ("one", "two"):
        record_arms(store, {None: Arm()}, cells=ONE, blocks=3, sweep=sweep)
    shutil.rmtree(next(path for _, path, status in store.statuses("two") if status.repeat == 1))
    found = sides_of_sweeps(store, "one", "two")
    assert found.failed == (("zero3", f"repeat 1: {NOT_RUN}"),)
