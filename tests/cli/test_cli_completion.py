"""What a shell completes: verbs, sweep files, sweeps, cells and arms."""

from __future__ import annotations

import json

import pytest

PLAN = {
    "cells": [{"id": "no_shard"}, {"id": "optim"}],
    "arms": [{"name": "base"}, {"name": "head"}],
}


@pytest.fixture
def completed(in_process, tmp_path, monkeypatch):
    """What a shell shows for a line, in a folder with a sweep that was run and a sweep file."""
    for name, plan in (("mine-base-vs-head", PLAN), ("other", {"cells": [{"id": "zero3"}]})):
        folder = tmp_path / "results" / "sweeps" / name
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "mine.yaml").write_text("name: mine\n")

    def complete(line: str) -> list[str]:
        monkeypatch.setenv("_MFSDP_BENCH_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", f"mfsdp-bench {line}")
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" "))))
        code, out, err = in_process()
        assert (code, err) == (0, "")
        return out.split()

    return complete


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ga", ["gate"]),
        ("baseline pro", ["promote"]),
        ("run quick", ["quickstart"]),
        ("plan mi", ["mine.yaml"]),
        ("status o", ["other"]),
        ("report mine", ["mine-base-vs-head"]),
        ("gate mi", ["mine-base-vs-head", "mine.yaml"]),
        ("gate mine.yaml --base ", ["base", "head"]),
        ("gate mine-base-vs-head --head h", ["head"]),
        ("gate mine-base-vs-head --only ", ["no_shard", "optim"]),
        ("gate other --only ", ["zero3"]),
        ("report other --reference z", ["zero3"]),
        ("compare other:", ["other:zero3"]),
        ("baseline save new mine", ["mine-base-vs-head"]),
        ("status --results nowhere ", []),
    ],
)
def test_completes(completed, line, expected):
    assert completed(line) == expected


def test_a_damaged_plan_completes_nothing_and_says_nothing(completed, tmp_path):
    (tmp_path / "results" / "sweeps" / "other" / "plan.json").write_text("{")
    assert completed("gate other --only ") == []
