from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bench.errors import NotAResultsFolderError, UsageError
from bench.record import SCHEMA_VERSION
from bench.store import ResultsStore


def test_a_new_folder_becomes_a_results_folder_of_this_version(tmp_path: Path) -> None:
    ResultsStore.open(tmp_path / "deep" / "results", create=True)
    assert (tmp_path / "deep/results/SCHEMA").read_text() == f"{SCHEMA_VERSION}\n"


@pytest.mark.parametrize("moment", range(7))
def test_a_second_command_may_make_the_folder_at_any_moment_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Hosts that are started together both find no folder."""
    calls: list[str] = []

    def with_a_second(name: str) -> None:
        function = getattr(os, name)

        def then_the_second(*given: Any, **options: Any) -> Any:
            done = function(*given, **options)
            calls.append(name)
            if len(calls) == moment + 1:
                ResultsStore.open(tmp_path / "results", create=True)
            return done

        monkeypatch.setattr(os, name, then_the_second)

    for name in ("mkdir", "open", "fsync", "replace"):
        with_a_second(name)
    store = ResultsStore.open(tmp_path / "results", create=True)
    assert len(calls) > moment
    assert store.sweeps() == []


def test_folders_of_tools_are_no_results_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "results" / "gpu-check").mkdir(parents=True)
    assert ResultsStore.open(tmp_path / "results", create=True).sweeps() == []


def test_a_folder_of_something_else_is_refused_and_left_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(NotAResultsFolderError, match="not empty and not a results folder"):
        ResultsStore.open(tmp_path, create=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("make", [False, True])
def test_reading_needs_a_results_folder_and_creates_nothing(tmp_path: Path, make: bool) -> None:
    root = tmp_path / "absent"
    if make:
        root.mkdir()
    with pytest.raises(NotAResultsFolderError, match="not a results folder"):
        ResultsStore.open(root, create=False)
    assert root.exists() == make


NEWER = SCHEMA_VERSION + 1


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize(
    ("schema", "name", "said"),
    [
        (f"{NEWER}\n", "", f"schema {NEWER}.*up to {SCHEMA_VERSION}"),
        ("<xml/>", "", "'<xml/>'; expected an integer"),
        ("", "x" * 300, "File name too long"),
    ],
)
def test_a_newer_version_and_what_cannot_be_read_are_refused(
    tmp_path: Path, schema: str, name: str, said: str, create: bool
) -> None:
    (tmp_path / "SCHEMA").write_text(schema)
    with pytest.raises(NotAResultsFolderError, match=said):
        ResultsStore.open(tmp_path / name, create=create)


def test_plans_are_listed_and_replaced(tmp_path: Path) -> None:
    store = ResultsStore.open(tmp_path, create=True)
    store.write_plan("b", {})
    store.write_plan("a", {"old": True})
    store.write_plan("a", {"new": True})
    assert store.sweeps() == ["a", "b"]
    assert store.read_plan("a") == {"new": True}


def test_a_damaged_plan_is_an_error_that_says_so(tmp_path: Path) -> None:
    store = ResultsStore.open(tmp_path, create=True)
    store.write_plan("quickstart", {})
    (tmp_path / "sweeps/quickstart/plan.json").write_text('{"cells": [')
    with pytest.raises(UsageError, match="not valid JSON"):
        store.read_plan("quickstart")


@pytest.mark.parametrize("name", ["../escape", "a/b", "", ".hidden", "a b", "x" * 200, "a\0"])
def test_a_sweep_id_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    store = ResultsStore.open(tmp_path, create=True)
    with pytest.raises(UsageError, match="cannot be a folder name"):
        store.write_plan(name, {})
    with pytest.raises(UsageError, match="cannot be a folder name"):
        store.read_plan(name)
