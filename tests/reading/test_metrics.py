"""A metric is one object: policy, gate, compare, baselines and reports read one list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_runs import ONE, Arm, judged_arms, record_arms

from bench.derive.metrics import METRICS, Metric, MetricRule
from bench.errors import UsageError
from reports.build import write_report
from reports.compare.baseline import make_baseline, read_baseline
from reports.compare.change import Change, change_table
from reports.compare.judge import judge
from reports.compare.policy import parse_policy
from reports.compare.sides import samples_of, sides_of_baseline
from reports.compare.text import other_table
from reports.views.sweep_view import load_side


@pytest.fixture
def energy():
    """A toy metric, as somebody would add it: an object in the list, and nothing else."""
    toy = Metric(
        "energy",
        "energy (J)",
        "",
        lambda _, summary: 2 * summary.rss_peak_bytes if summary.rss_peak_bytes else None,
        judge="ratio",
        rule=MetricRule("required", 0.01, "lower_is_better"),
    )
    METRICS.append(toy)
    yield toy
    METRICS.remove(toy)


def test_a_policy_knows_it(energy):
    found = parse_policy({"metrics": {"energy": {"tolerance": "3%"}}}, lambda _: 1, "gates.yaml")
    assert found.rules["energy"].tolerance == 0.03
    with pytest.raises(UsageError, match=r"unknown key 'energie'; expected .*energy"):
        parse_policy({"metrics": {"energie": {}}}, lambda _: 1, "gates.yaml")


def test_gates_and_tables_judge_it(energy, store):
    result = judged_arms(store, cells=ONE, blocks=2)
    (found,) = result.of_metric("energy")
    assert (found.verdict, found.base) == ("equivalent", 8e8)
    assert "energy" in other_table(result.judgements).rows[-1].cells


def test_comparisons_reports_and_baselines_show_it(energy, store, tmp_path: Path):
    for sweep in ("a", "b"):
        record_arms(store, {None: Arm()}, sweep=sweep, cells=ONE, blocks=2)
    change = Change(*(load_side(store, sweep)[0] for sweep in ("a", "b")))
    assert change.of(energy) == 0.0
    assert "energy (J) change" in [column.title for column in change_table([change]).columns]
    text = write_report(store, ["a"], tmp_path).markdown.read_text()
    assert "energy (J)" in text
    assert "800,000,000" in text
    saved = make_baseline("m", "a", "", samples_of(store, "a"))
    kept = read_baseline(json.loads(saved.to_text()), "m.json")
    result = judge(sides_of_baseline(store, "m", kept.cells, "b"))
    assert [one.verdict for one in result.judgements if one.metric == "energy"] == ["equivalent"]
