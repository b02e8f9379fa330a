"""Part `core`: every strategy trains as plain torch does, and the tests that need a device run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree as ET

from bench.spec import STRATEGIES
from tools.gpu_check.record import ROOT, Device, PartFindings
from tools.gpu_check.trained import Trained
from tools.gpu_check.training import note_ranks, rank_count, ranks, run, small_run

_RELATIVE = 1e-4
_TEST_SECONDS = 180
#: pytest's own exit codes: all passed, some failed, none selected.
_PYTEST_PASSED, _PYTEST_FAILED, _PYTEST_NONE = 0, 1, 5
#: Tests that need a device; whether one rank runs them.
_MARKS = {"gpu and not multigpu": True, "multigpu": False}
#: Engines whose losses must be those of plain torch; a sample of allocators and schedules.
_VARIANTS: tuple[dict[str, Any], ...] = (
    *({"strategy": strategy} for strategy in STRATEGIES),
    {"strategy": "optim_grads_params", "allocator": "fixed_pool", "double_buffer": True},
    {"strategy": "optim_grads_params", "allocator": "max_pool", "double_buffer": True},
    {"strategy": "optim_grads_params", "transport": "native"},
    {"strategy": "optim_grads", "overlap_param_gather": False},
)


def check(device: Device) -> PartFindings:
    """Run the part."""
    findings = PartFindings()
    note_ranks(device, findings)
    with ranks(device, rank_count(device)) as workers:
        plain = run(workers, small_run(device, {"name": "single"}), findings, "single")
        for variant in _VARIANTS:
            name = " ".join(str(value) for value in variant.values())
            found = run(workers, small_run(device, {"name": "mfsdp", **variant}), findings, name)
            if plain is None or found is None:
                continue
            wanted, losses = plain[0].losses, mean_losses(found)
            apart = max(abs(a - b) / abs(a) for a, b in zip(wanted, losses, strict=True))
            said = f"losses differ by {apart:.1e} of plain torch's; allowed {_RELATIVE:.0e}"
            findings.expect(name, apart <= _RELATIVE, said)
            findings.measurements[name] = {"losses": losses, "plain": wanted}
    for marked, on_one_rank in _MARKS.items():
        findings.on_one_rank = on_one_rank
        _run_tests(marked, findings)
    return findings


def device_tests(folder: Path = ROOT / "tests") -> list[Path]:
    """Test files that have a test which needs a device."""
    marked = re.compile(r"pytest\.mark\.(gpu|multigpu)\b")
    return [file for file in sorted(folder.rglob("test_*.py")) if marked.search(file.read_text())]


def mean_losses(found: list[Trained]) -> list[float]:
    """Per step the mean over ranks, each of which has seen its share of the batch."""
    return [mean(losses) for losses in zip(*(one.losses for one in found), strict=True)]


def _run_tests(marked: str, findings: PartFindings) -> None:
    with TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-m", marked),
                *("-p", "no:cacheprovider", f"--junitxml={report}"),
                *map(str, device_tests()),
            ],
            cwd=ROOT,
            timeout=_TEST_SECONDS,
            check=False,
        )
        if done.returncode not in {_PYTEST_PASSED, _PYTEST_FAILED} or not report.exists():
            said = f"pytest ended with {done.returncode}"
            said += ": no test selected" if done.returncode == _PYTEST_NONE else "; see the log"
            findings.expect("device tests", False, said)
            return
        note_tests(report, findings)


def note_tests(report: Path, findings: PartFindings) -> None:
    """One check per test of a JUnit report that pytest wrote."""
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        skipped = case.find("skipped")
        if problem is not None:
            findings.note(name, "failed", problem.get("message", "")[:500])
        elif skipped is not None:
            findings.note(name, "skipped", skipped.get("message", ""))
        else:
            findings.expect(name, True, "")
