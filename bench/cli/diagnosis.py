"""`doctor`: the findings of `bench.doctor` as a table or as JSON. Loads no torch itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.cli import console, exit_codes
from bench.cli.interrupts import stop_on_signals
from bench.doctor.accelerators import accelerator_findings, clock_findings
from bench.doctor.finding import Finding
from bench.doctor.machine import machine_findings
from bench.doctor.packages import package_findings
from bench.doctor.results_folder import results_findings
from bench.doctor.slurm import slurm_findings
from bench.errors import UsageError
from bench.launch.local.launcher import LocalLauncher
from bench.launch.protocol import Launcher
from bench.launch.stop_request import StopRequest
from bench.resolve import Machine
from bench.spec import DeviceType

_CPU_RANKS = 2


def show_diagnosis(results: Path, *, as_json: bool) -> int:
    """Print the findings; 3 if no run can start here."""
    findings = diagnose(Machine.detect(), results)
    print_findings(findings, as_json=as_json)
    broken = any(finding.level == "problem" for finding in findings)
    return exit_codes.NOTHING_MEASURED if broken else exit_codes.OK


def show_cluster(results: Path, ranks: int | None, device: str | None, *, as_json: bool) -> int:
    """Run the short job over all nodes; 3 if it fails, 1 if nodes differ, 130 after Ctrl-C."""
    from bench.doctor.cluster import Asked, probe_cluster

    machine = Machine.detect()
    kind = _device(device, machine)
    nodes, launcher = _allocation()
    count = ranks or nodes * (len(machine.cuda_devices) if kind == "cuda" else _CPU_RANKS)
    if count % nodes:
        raise UsageError(f"--ranks {count}: expected a multiple of the {nodes} nodes of this job")
    stop = StopRequest()
    console.note(f"a job of {count} ranks on {nodes} nodes ({kind}), about a minute at most")
    with stop_on_signals(stop):
        probe = probe_cluster(Asked(count, kind, nodes), launcher, results, stop)
    if stop.is_set():
        return exit_codes.INTERRUPTED
    print_findings(probe.findings, as_json=as_json)
    if not probe.finished:
        return exit_codes.NOTHING_MEASURED
    differ = any(finding.level == "problem" for finding in probe.findings)
    return exit_codes.REQUIREMENT_NOT_MET if differ else exit_codes.OK


def _allocation() -> tuple[int, Launcher]:
    """The nodes of the Slurm job that this process is in, and what starts ranks there."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if "SLURM_JOB_ID" not in os.environ or not nodes.isdecimal() or int(nodes) <= 1:
        return 1, LocalLauncher()
    from bench.launch.slurm.launcher import SlurmLauncher
    from bench.launch.slurm.settings import SlurmSettings

    return int(nodes), SlurmLauncher(SlurmSettings())


def _device(asked: str | None, machine: Machine) -> DeviceType:
    if asked is None:
        return "cuda" if machine.cuda_devices else "cpu"
    if asked not in {"cpu", "cuda"}:
        raise UsageError(f"--device {asked}: expected cpu or cuda")
    if asked == "cuda" and not machine.cuda_devices:
        raise UsageError("--device cuda: this machine has no CUDA device; leave it out, or say cpu")
    return "cuda" if asked == "cuda" else "cpu"


def diagnose(machine: Machine, results: Path) -> list[Finding]:
    """Everything worth knowing before a first run; a terminal shows what is being looked at."""
    checks: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
        ("this machine", lambda: machine_findings(machine)),
        ("the results folder", lambda: results_findings(results)),
        ("packages", package_findings),
        ("torch and its companions: they are loaded", lambda: accelerator_findings(machine)),
        ("clocks of the GPUs", lambda: clock_findings(machine)),
        ("Slurm: its controller is asked", slurm_findings),
    )
    found = []
    try:
        for number, (what, check) in enumerate(checks, start=1):
            console.waiting(f"{number}/{len(checks)} {what} ...")
            found += check()
    finally:
        console.waiting("")
    return found


def print_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    """As a table, with what is missing and how to get it below; or as JSON."""
    if as_json:
        console.data_json({"findings": [asdict(finding) for finding in findings]})
        return
    rows = [(finding.level, finding.what, finding.found) for finding in findings]
    console.data(console.columns(("", "what", "found"), rows))
    missing = [(one.what, one.gives or "-", one.remedy) for one in findings if one.remedy]
    if missing:
        console.data("\n" + console.columns(("missing", "it gives", "how to get it"), missing))
