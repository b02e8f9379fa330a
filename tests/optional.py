"""What a machine may lack, and the one place where tests ask for it.

    @pytest.mark.needs("sshd")

skips a test where sshd is absent, and prints the reason; `pytest -m needs` selects such tests.
ABSENT="sshd deepspeed", or ABSENT=all, tests what a machine without these would.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Collection, MutableMapping
from pathlib import Path
from typing import Any

import pytest

_SLURM = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
#: Name -> the programs, and the packages of Debian that bring them.
PROGRAMS = {
    "g++": (("g++",), "g++"),
    "sshd": (("sshd", "ssh", "ssh-keygen"), "openssh-server"),
    "slurm": (_SLURM, "slurm-wlm munge"),
}
#: Python packages. `make venv` fetches the files of Transformer Engine, which need no CUDA.
PACKAGES = (
    *("accelerate", "asv", "deepspeed", "einops", "megatron_fsdp", "jsonschema", "pyarrow"),
    *("safetensors", "tensorboard"),
    *("transformer_engine", "transformer_engine_files", "transformers"),
)
#: No test needs these: ABSENT takes them from all tests and from what they start.
SURROUNDINGS: dict[str, dict[str, str]] = {
    "git_identity": {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    },
    "home": {"HOME": "/nonexistent", "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": ""},
    "locale": {"LC_ALL": "C", "LANG": "C", "LANGUAGE": ""},
}
CORES = "two_cores"
CPU_BUILD = "cpu_torch"
_SBIN = ("/usr/sbin", "/usr/local/sbin", "/sbin")


def program(name: str) -> str | None:
    """The path of a program, which may lie where only administrators look."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *_SBIN]))


def files_of_transformer_engine() -> Path | None:
    """The folder of its Python files, also where the package itself cannot be imported."""
    aside = Path(sys.prefix, "sources", "transformer_engine")
    found = importlib.util.find_spec("transformer_engine")
    if aside.is_dir() or found is None or found.origin is None:
        return aside if aside.is_dir() else None
    return Path(found.origin).parent


def param(value: object, needs: Collection[str], id: str) -> Any:
    """A parameter of tests that need these."""
    return pytest.param(value, id=id, marks=pytest.mark.needs(*needs) if needs else ())


def missing(name: str) -> str | None:
    """Why a test that needs it is skipped; None where it is here."""
    if name in absent():
        return f"needs {name}, and ABSENT names it"
    if name in PROGRAMS:
        programs, packages = PROGRAMS[name]
        lacking = ", ".join(one for one in programs if program(one) is None)
        return f"needs {lacking}: apt-get install {packages}" if lacking else None
    if name == CORES:
        cores = len(os.sched_getaffinity(0))
        return f"needs two processor cores, found {cores}" if cores < 2 else None
    if name == CPU_BUILD:
        found = importlib.util.find_spec("torch")
        torch = Path(found.origin or "").parent if found else Path()
        other = Path(torch, "lib", "libtorch_cuda.so").exists()
        return "needs torch's CPU build, found that for CUDA" if other else None
    if name == "transformer_engine_files":
        here = files_of_transformer_engine() is not None
    else:
        here = importlib.util.find_spec(name) is not None
    return None if here else f"needs the Python package {name}: make venv installs what it can"


def absent() -> set[str]:
    """What ABSENT names."""
    known = {*PROGRAMS, *PACKAGES, *SURROUNDINGS, CORES, CPU_BUILD}
    named = set(os.environ.get("ABSENT", "").split())
    if named == {"all"}:
        return known
    if named - known:
        wrong = " ".join(sorted(named - known))
        raise pytest.UsageError(f"ABSENT: expected all or some of {sorted(known)}, found {wrong}")
    return named


def take_surroundings(variables: MutableMapping[str, str]) -> None:
    """Those that ABSENT names."""
    for name in absent() & set(SURROUNDINGS):
        variables |= SURROUNDINGS[name]


def skip_what_needs_more(items: list[pytest.Item]) -> None:
    """Tests whose mark `needs` names something that is not here."""
    for item in items:
        for mark in item.iter_markers("needs"):
            for reason in filter(None, map(missing, mark.args)):
                item.add_marker(pytest.mark.skip(reason=reason))
