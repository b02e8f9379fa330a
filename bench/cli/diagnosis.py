"""`doctor`: what this machine and this installation can run. Loads no torch."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from importlib import metadata, util
from typing import Any

from bench.cli import console, exit_codes
from bench.resolve import Machine

_MINIMUM_PYTHON = (3, 11)
_NEEDED = (
    "torch",
    "numpy",
    "pandas",
    "matplotlib",
    "scipy",
    "pydantic",
    "ruamel.yaml",
    "typer",
    "rich",
    "jinja2",
    "junitparser",
    "psutil",
)
_EXTRAS = {
    "gpu": ("nvidia-ml-py", "nvtx", "transformer-engine"),
    "slurm": ("submitit",),
    "fp8": ("torchao",),
    "parquet": ("pyarrow",),
    "safetensors": ("safetensors",),
}


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis; `level` is ok, note (a capability is absent) or problem."""

    level: str
    what: str
    found: str


def show_diagnosis(*, as_json: bool) -> int:
    """Print the findings; 3 if no run can start here."""
    findings = diagnose(Machine.detect())
    if as_json:
        console.data_json({"findings": [vars(finding) for finding in findings]})
    else:
        rows = [(f.level, f.what, f.found) for f in findings]
        console.data(console.columns(("", "what", "found"), rows))
    broken = any(finding.level == "problem" for finding in findings)
    return exit_codes.NOTHING_MEASURED if broken else exit_codes.OK


def diagnose(machine: Machine) -> list[Finding]:
    """Everything worth knowing before a first run."""
    return [*_python(), *_machine(machine), *_packages(), *_extras()]


def _python() -> list[Finding]:
    level = "ok" if sys.version_info >= _MINIMUM_PYTHON else "problem"
    return [
        Finding(level, "python", platform.python_version()),
        Finding("ok" if sys.platform == "linux" else "note", "system", platform.platform()),
    ]


def _machine(machine: Machine) -> list[Finding]:
    gpus: list[Any] = list(machine.cuda_device_names)
    return [
        Finding("ok", "processor", f"{machine.cpu_count} cores, {machine.cpu_name or 'unknown'}"),
        Finding("ok", "memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
        Finding(
            "ok" if gpus else "note",
            "CUDA devices",
            ", ".join(gpus) or "none: cells with launch.device cuda are pruned",
        ),
    ]


def _packages() -> list[Finding]:
    findings = []
    for name in _NEEDED:
        version = _version(name)
        level = "ok" if version else "problem"
        findings.append(Finding(level, name, version or "missing: install mfsdp-bench again"))
    core = util.find_spec("mfsdp_core")
    place = str(core.origin) if core and core.origin else "missing"
    findings.append(Finding("ok" if core else "problem", "mfsdp_core", place))
    return findings


def _extras() -> list[Finding]:
    findings = []
    for extra, names in _EXTRAS.items():
        missing = [name for name in names if _version(name) is None]
        text = f"not installed ({', '.join(missing)}): pip install 'mfsdp-bench[{extra}]'"
        level = "note" if missing else "ok"
        findings.append(Finding(level, f"extra {extra}", text if missing else "installed"))
    return findings


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
