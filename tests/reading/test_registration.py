"""A run that did not get the registration that it asked for says so where a report begins."""

from __future__ import annotations

from dataclasses import replace

from bench.record import RunRecord, RunStatus
from bench.resolve.machine import Machine
from bench.resolve.resolution import resolve
from bench.spec import RunSpec
from reports.views.machine import registration_shortfalls


def record(registration: object) -> RunRecord:
    resolved = resolve(RunSpec(), Machine.detect())
    bare = RunRecord("id", resolved, RunStatus(), {}, {})
    return replace(bare, environment={"runtime": {"buffer_registration": registration}})


def registered(*got: str, grown: bool = False) -> RunRecord:
    groups = {
        name: {"got": level, "reason": "TypeError: symm"}
        for name, level in zip("ab", got, strict=False)
    }
    return record({"wanted": "symmetric", "groups": groups, "grown": grown})


def test_what_was_asked_for_and_given_is_no_warning():
    assert registration_shortfalls([registered("symmetric", "symmetric"), record(None)]) == []


def test_each_group_that_got_less_is_named_with_the_reason_and_the_number_of_runs():
    found = registration_shortfalls([registered("symmetric", "plain")] * 2 + [registered("none")])
    assert found == [
        "Buffers were to be registered with NCCL as symmetric; group b got plain instead: "
        "TypeError: symm. (2 runs)",
        "Buffers were to be registered with NCCL as symmetric; group a got none instead: "
        "TypeError: symm. (1 runs)",
    ]


def test_memory_that_came_too_late_is_named():
    assert "lacks it" in registration_shortfalls([registered("symmetric", grown=True)])[0]
