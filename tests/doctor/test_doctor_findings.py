"""What `doctor` says about machines that are not this one: each judgement from made-up facts."""

from __future__ import annotations

import errno
import io
import resource
from pathlib import Path
from typing import Any

import pytest

from bench.cli.doctor import diagnose
from bench.doctor import checks
from bench.errors import UsageError
from bench.resolve import Machine
from bench.store.file_lock import FileLock

FACTS: dict[str, Any] = {
    "torch": "2.13.0",
    "cuda_compiled": "12.8",
    "cuda_usable": True,
    "nccl": {"compiled": "2.28.3", "loaded": "2.28.3"},
}


def by_name(found: list[Any]) -> dict[str, Any]:
    return {one.what: one for one in found}


@pytest.mark.parametrize(
    ("changes", "what", "level", "said"),
    [
        ({"cuda_compiled": None, "cuda_usable": False}, "CUDA", "problem", "without it"),
        ({"cuda_usable": False}, "CUDA", "problem", "cannot use the devices"),
        ({"nccl": {"compiled": "2.28.3", "loaded": "2.21.5"}}, "NCCL", "note", "loaded 2.21.5"),
    ],
)
def test_each_missing_piece_says_what_it_would_give_and_how_to_get_it(
    changes: dict[str, Any], what: str, level: str, said: str
) -> None:
    finding = by_name(checks.judged(FACTS | changes, has_gpu=True))[what]
    assert finding.level == level
    assert said in finding.found
    assert finding.gives
    assert finding.remedy


def test_a_complete_gpu_machine_and_a_cpu_build_without_a_gpu_lack_nothing_that_is_a_problem() -> (
    None
):
    assert {one.level for one in checks.judged(FACTS, has_gpu=True)} == {"ok"}
    facts = FACTS | {"cuda_compiled": None, "cuda_usable": False}
    assert by_name(checks.judged(facts, has_gpu=False))["CUDA"].level == "note"


def test_a_torch_that_does_not_load_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.sys, "executable", "/bin/false")
    (finding,) = checks.torch_findings(Machine(1, 1))
    assert (finding.level, finding.what) == ("problem", "torch loads")
    assert "exit code 1" in finding.found


def test_a_results_folder_without_locks_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise UsageError(f"cannot lock: {errno.ENOLCK}")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    found = by_name(checks.results_findings(tmp_path / "results"))
    assert found["file locks"].level == "problem"
    assert list(tmp_path.iterdir()) == []


def test_limits_that_bind_are_named() -> None:
    assert checks.open_files(1024, 1 << 20).level == "note"
    assert checks.open_files(1 << 16, 1 << 20).level == "ok"
    assert checks.open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY).found.endswith(
        "unlimited"
    )
    assert checks.shared_memory(Path("/no/such")).level == "note"


def test_an_extra_that_is_missing_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checks, "installed_version", lambda name: None if name == "pyarrow" else "1"
    )
    finding = by_name(checks.package_findings())["pyarrow"]
    assert finding.remedy == "pip install 'mfsdp-bench[parquet]'"


def test_a_terminal_sees_what_is_being_looked_at_and_nothing_is_left_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setattr("bench.doctor.checks.torch_findings", lambda _: [])
    found = diagnose(Machine(2, 2**30, ()), tmp_path)
    assert shown.getvalue() == ""

    monkeypatch.setattr(shown, "isatty", lambda: True)
    assert [one.what for one in diagnose(Machine(2, 2**30, ()), tmp_path)] == [
        one.what for one in found
    ]
    lines = shown.getvalue().split("\r\x1b[K")
    assert "4/4 torch: it is loaded ..." in lines
    assert lines[-1] == ""
