"""Slurm, if this machine has its commands: version, partitions, limits."""

from __future__ import annotations

import shutil
import subprocess

from bench.doctor.finding import DoctorFinding

_ANSWER_SECONDS = 10.0
_LIMITS = ("MaxArraySize", "MaxJobCount")
_PARTITION = "%P|%a|%D|%c|%m|%G|%l"


def slurm_findings() -> list[DoctorFinding]:
    """One line if there is none."""
    if shutil.which("sinfo") is None:
        return [
            DoctorFinding(
                "note",
                "Slurm",
                "no sinfo on PATH",
                "sweeps as jobs of a cluster: run --launcher slurm",
                "run on a login node of the cluster (or apt-get install slurm-client)",
            )
        ]
    try:
        version = _answer("sinfo", "--version").removeprefix("slurm ")
        partitions = partition_texts(_answer("sinfo", "-h", "-o", _PARTITION))
        limits = limit_text(_answer("scontrol", "show", "config"))
    except SilentSlurmError as error:
        remedy = "a slurm.conf that names a controller which answers; sinfo shows it"
        return [DoctorFinding("note", "Slurm", str(error), "sweeps as jobs of a cluster", remedy)]
    shown = [DoctorFinding("ok", "Slurm", f"{version}; {limits}")]
    return shown + [DoctorFinding("ok", f"partition {name}", text) for name, text in partitions]


class SilentSlurmError(Exception):
    """A command of Slurm that failed, or did not answer in time."""


def partition_texts(table: str) -> list[tuple[str, str]]:
    """Name and description of each line of `sinfo -o`; the default one has a * behind its name."""
    found = []
    for line in table.splitlines():
        name, state, nodes, cores, memory, devices, time_limit = line.split("|")
        described = f"{state}, {nodes} nodes of {cores} cores and {memory} MiB"
        if devices not in {"", "(null)"}:
            described += f", {devices}"
        found.append((name, f"{described}, time limit {time_limit}"))
    return found


def limit_text(config: str) -> str:
    """The limits that bound a sweep, out of `scontrol show config`."""
    pairs = (line.partition("=")[::2] for line in config.splitlines())
    known = {key.strip(): value.strip() for key, value in pairs}
    return ", ".join(f"{name} {known[name]}" for name in _LIMITS if name in known)


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SilentSlurmError(f"{command[0]} does not answer: {error}") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise SilentSlurmError(f"{command[0]} fails: {said[0][:100]}")
    return done.stdout.strip()
