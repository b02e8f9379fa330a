"""Part `validate`: the validator's cases on this device, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from tempfile import TemporaryDirectory
from typing import Any

from tools.gpu_check.record import ROOT, SHARES_DEVICE, Device, PartFindings

_SECONDS = 220
#: On a CPU the suite of tests covers the rest.
_CPU_CASES = "mfsdp/*/2/stack/bf16/k2"


def check(device: Device) -> PartFindings:
    """Run the part."""
    findings = PartFindings()
    ranks = ["--ranks", "2"]
    chosen = [*ranks, "--case", _CPU_CASES] if device == "cpu" else []
    if os.environ.get(SHARES_DEVICE):
        chosen += ranks
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "bench", "validate", "mfsdp", *chosen),
                *("--results", folder, "--json"),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    if not done.stdout.strip():
        findings.expect("validate", False, f"no verdicts; exit code {done.returncode}")
        return findings
    note_verdicts(json.loads(done.stdout), findings)
    return findings


def note_verdicts(record: dict[str, Any], findings: PartFindings) -> None:
    """One check per case; cases that this machine cannot run are counted by reason."""
    absent: dict[str, int] = {}
    for case in record["cases"]:
        if case["state"] == "not_applicable":
            absent[case["reason"]] = absent.get(case["reason"], 0) + 1
        else:
            passed = case["state"] == "passed"
            findings.on_one_rank = case["settings"]["ranks"] == 1
            findings.expect(case["case"], passed, "" if passed else json.dumps(case)[:500])
    for reason, count in absent.items():
        findings.note(f"{count} cases", "skipped", reason)
    findings.measurements["device"] = record["device"]
