"""Every patch of `tests/core/patches` fits the core, and cases of `validate` notice it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.errors import UsageError
from bench.testing.workers import ForkServer
from bench.validate.matrix import cases
from tools.bug_in_a_copy import BUG_BY_ID, BUGS, CORE, PATCHES, UNLISTED, apply, copy_of_core
from tools.kill_matrix import on_cases

SEEN_FROM_OUTSIDE = (*BUGS, *UNLISTED)
QUICK = cases("mfsdp", full=False)
R1 = BUG_BY_ID["R1"]


def test_every_file_of_the_folder_is_a_bug_with_a_title() -> None:
    assert {*BUG_BY_ID.values()} == set(PATCHES.rglob("*.*"))
    titles = [bug.read_text().partition("\n\n")[0] for bug in BUG_BY_ID.values()]
    assert [one for one in titles if not one or one.startswith(("diff", "---"))] == []


@pytest.mark.parametrize("bug", BUG_BY_ID.values(), ids=lambda bug: bug.stem)
def test_a_patch_still_fits_the_source(bug: Path, tmp_path: Path) -> None:
    core = copy_of_core(tmp_path, bug)
    changed = [f for f in core.rglob("*.py") if f.read_bytes() != original(f, core)]
    named = set(re.findall(r"^\+\+\+ b/mfsdp_core/(\S+)", bug.read_text(), re.MULTILINE))
    assert {str(file.relative_to(core)) for file in changed} == named
    for file in changed:
        compile(file.read_text(), str(file), "exec")


def original(file: Path, core: Path) -> bytes:
    return (CORE / file.relative_to(core)).read_bytes()


def test_a_patch_fits_also_where_lines_have_moved(tmp_path: Path) -> None:
    moved = tmp_path / "moved.patch"
    moved.write_text(re.sub(r"@@ -\d+,(\d+) \+\d+", r"@@ -400,\1 +400", R1.read_text()))
    (tmp_path / "plain").mkdir()
    plain, core = copy_of_core(tmp_path / "plain", R1), copy_of_core(tmp_path, moved)
    file = "runtime/gradient_buffers.py"
    assert (plain / file).read_text() == (core / file).read_text()


@pytest.mark.parametrize("text", ["", "--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-a\n+b\n"])
def test_a_patch_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    copy_of_core(tmp_path)
    (tmp_path / "README.md").write_text("a\n")
    patch = tmp_path / "other.patch"
    patch.write_text(text)
    with pytest.raises(UsageError, match="does not fit mfsdp_core: expected a unified diff"):
        apply(tmp_path, patch)


@pytest.mark.processes
def test_cases_notice_a_patch_and_nothing_else(fork_server: ForkServer, tmp_path: Path) -> None:
    first_failure = on_cases(fork_server, QUICK)
    ids = [case.id for case in QUICK if case.ranks == 2 and "/fp64/" in case.id][:3]
    for name in ("plain", "R2"):
        (tmp_path / name).mkdir()
    copy_of_core(tmp_path / "plain")
    assert first_failure(tmp_path / "plain", ids) == {}
    copy_of_core(tmp_path / "R2", BUG_BY_ID["R2"])
    assert first_failure(tmp_path / "R2", [case.id for case in QUICK])["check"] == "gradients"


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("bug", SEEN_FROM_OUTSIDE, ids=lambda bug: bug.stem)
def test_cases_notice_every_patch(fork_server: ForkServer, bug: Path, tmp_path: Path) -> None:
    copy_of_core(tmp_path, bug)
    assert on_cases(fork_server, QUICK)(tmp_path, [case.id for case in QUICK])
