"""A report says when the machine was busy with something else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.record import RunRecord, RunStatus
from bench.resolve import Machine, resolve
from bench.spec import RunSpec
from reports.views.machine import busiest_start


def record(load: object) -> RunRecord:
    resolved = resolve(RunSpec(), Machine.detect())
    bare = RunRecord("id", resolved, RunStatus(), {}, {})
    return replace(bare, environment={"load_average_before": load, "cpu_count": 2})


@pytest.mark.parametrize("load", [0.1, 2.0, 3.0, None, "busy"])
def test_the_load_of_the_benchmark_itself_is_no_warning(load):
    assert busiest_start([record(load)]) == ""


def test_the_worst_load_is_named():
    text = busiest_start([record(1.0), record(9.5), record(4.0)])
    assert "load average was 9.5, where 2 would be" in text
