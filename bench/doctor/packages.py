"""Python, the packages that every run needs, and the optional ones."""

from __future__ import annotations

import platform
import sys
from importlib import util

from bench.doctor.finding import DoctorFinding
from bench.launch.code import installed_version

_MINIMUM_PYTHON = (3, 11)
_NEEDED = (
    "torch",
    "numpy",
    "pandas",
    "matplotlib",
    "pydantic",
    "ruamel.yaml",
    "typer",
    "rich",
    "jinja2",
    "junitparser",
    "psutil",
    "zstandard",
    "nvtx",
)
_EXTRAS = (
    ("gpu", "nvidia-ml-py", "names, memory, clocks and power caps of GPUs in every record"),
    ("gpu", "transformer-engine", "FP8 layers and quantised weights of Transformer Engine"),
    ("", "megatron-fsdp", "the engine megatron_fsdp, on CUDA"),
    ("parquet", "pyarrow", "export --to parquet"),
    ("history", "ruptures", "change points of times: history"),
    ("safetensors", "safetensors", "checkpoints in the safetensors format"),
)


def package_findings() -> list[DoctorFinding]:
    """Packages by their metadata: none of them is loaded."""
    return [_python(), *(_needed(name) for name in _NEEDED), _core(), *map(_extra, _EXTRAS)]


def _python() -> DoctorFinding:
    wanted = ".".join(map(str, _MINIMUM_PYTHON))
    found = platform.python_version()
    if sys.version_info >= _MINIMUM_PYTHON:
        return DoctorFinding("ok", "python", found)
    return DoctorFinding(
        "problem", "python", found, "every run", f"install Python {wanted} or later"
    )


def _needed(name: str) -> DoctorFinding:
    version = installed_version(name)
    if version is not None:
        return DoctorFinding("ok", name, version)
    return DoctorFinding(
        "problem", name, "missing", "every run needs it", "install mfsdp-bench again"
    )


def _core() -> DoctorFinding:
    core = util.find_spec("mfsdp_core")
    if core is not None and core.origin:
        return DoctorFinding("ok", "mfsdp_core", core.origin)
    remedy = "install mfsdp-bench again"
    return DoctorFinding("problem", "mfsdp_core", "missing", "the engine mfsdp", remedy)


def _extra(extra: tuple[str, str, str]) -> DoctorFinding:
    group, name, gives = extra
    version = installed_version(name)
    if version is not None:
        return DoctorFinding("ok", name, version)
    extra_command = f"pip install 'mfsdp-bench[{group}]'"
    remedy = extra_command if group else f"pip install --no-deps {name}==0.6.1 einops"
    return DoctorFinding("note", name, "not installed", gives, remedy)
