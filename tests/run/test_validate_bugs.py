"""The validator notices bugs that are injected into the core, on the list or not."""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.errors import UsageError
from bench.testing.workers import ForkServer
from bench.validate.bugs import BUGS, UNLISTED, Bug, bug_of
from bench.validate.injection import inject, parse_bugs
from bench.validate.matrix import AnyCase, cases
from bench.validate.patched_core import CORE, copy_of_core
from bench.validate.session import WorkerSettings
from bench.verdict import BugVerdict

pytestmark = pytest.mark.processes

QUICK = cases("mfsdp", full=False)
SAMPLE = ("R2",)


def injected(
    fork_server: ForkServer, bug: Bug, asked: Sequence[AnyCase] = tuple(QUICK)
) -> BugVerdict:
    (verdict,) = inject(fork_server, [bug], asked, WorkerSettings(), threading.Event())
    return verdict


def test_a_bug_is_asked_for_by_its_number() -> None:
    assert [bug.id for bug in parse_bugs("r2, R1")] == ["R2", "R1"]
    assert parse_bugs("all") == BUGS
    assert parse_bugs("unlisted") == UNLISTED


@pytest.mark.parametrize("bug", parse_bugs(",".join(SAMPLE)), ids=lambda bug: bug.id)
def test_a_sample_of_historical_bugs_is_noticed(fork_server: ForkServer, bug: Bug) -> None:
    assert injected(fork_server, bug).outcome == "caught"


PATCHED = pytest.mark.parametrize("bug", [*BUGS, *UNLISTED], ids=lambda bug: bug.id)


@PATCHED
def test_a_patch_still_fits_the_source(bug: Bug, tmp_path: Path) -> None:
    core = copy_of_core(tmp_path, bug.patch)
    changed = [f for f in core.rglob("*.py") if f.read_text() != original(f, core)]
    named = set(re.findall(r"^\+\+\+ b/mfsdp_core/(\S+)", bug.patch.read_text(), re.MULTILINE))
    assert {str(file.relative_to(core)) for file in changed} == named
    for file in changed:
        compile(file.read_text(), str(file), "exec")


def original(file: Path, core: Path) -> str:
    return (CORE / file.relative_to(core)).read_text()


def harmless(folder: Path) -> Path:
    """A patch as somebody may bring it: made by `diff`, without a title."""
    path = "runtime/reduction_queue.py"
    old = (CORE / path).read_text()
    assert old.count("IN_FLIGHT = 1\n") == 1
    new = old.replace("IN_FLIGHT = 1\n", "IN_FLIGHT = 2\n")
    lines = difflib.unified_diff(
        old.splitlines(True), new.splitlines(True), f"mfsdp_core/{path}", f"mfsdp_core/{path}"
    )
    patch = folder / "harmless.patch"
    patch.write_text("".join(lines))
    return patch


def test_anybodys_patch_is_taken_also_where_lines_have_moved(tmp_path: Path) -> None:
    (bug,) = parse_bugs(str(harmless(tmp_path)))
    assert (bug.id, bug.title) == ("harmless", "harmless")
    moved = tmp_path / "moved.patch"
    moved.write_text(re.sub(r"@@ -\d+,(\d+) \+\d+", r"@@ -400,\1 +400", bug.patch.read_text()))
    core = copy_of_core(tmp_path, moved)
    assert "IN_FLIGHT = 2" in (core / "runtime" / "reduction_queue.py").read_text()


@pytest.mark.parametrize("text", ["", "--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-a\n+b\n"])
def test_a_patch_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    patch = tmp_path / "other.patch"
    patch.write_text(text)
    with pytest.raises(UsageError, match="does not fit mfsdp_core: expected a unified diff"):
        parse_bugs(str(patch))


BROKEN = {
    "a syntax error": ("IN_FLIGHT = 1\n", "IN_FLIGHT = = 1\n", "SyntaxError"),
    "an import that fails": ("IN_FLIGHT = 1\n", "IN_FLIGHT = ONE\n", "NameError: name 'ONE'"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_patch_that_leaves_no_core_to_ask_is_broken_and_not_caught(
    fork_server: ForkServer, tmp_path: Path, kind: str
) -> None:
    old, new, said = BROKEN[kind]
    patch = harmless(tmp_path)
    patch.write_text(patch.read_text().replace(old.replace("1", "2"), new))
    verdict = injected(fork_server, bug_of(patch))
    assert (verdict.outcome, verdict.cases_run) == ("broken", 0)
    assert said in verdict.reason


def test_a_patch_that_no_longer_fits_is_broken(fork_server: ForkServer, tmp_path: Path) -> None:
    patch = harmless(tmp_path)
    patch.write_text(patch.read_text().replace("-IN_FLIGHT", "-NO_SUCH"))
    verdict = injected(fork_server, bug_of(patch))
    assert verdict.outcome == "broken"
    assert "does not fit mfsdp_core" in verdict.reason


def test_a_change_that_changes_nothing_is_not_noticed(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    sample = [case for case in QUICK if case.ranks == 2 and "/fp64/" in case.id][:3]
    (bug,) = parse_bugs(str(harmless(tmp_path)))
    assert injected(fork_server, bug, sample).outcome == "missed"


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@PATCHED
def test_every_bug_is_noticed(fork_server: ForkServer, bug: Bug) -> None:
    assert injected(fork_server, bug).outcome == "caught"
