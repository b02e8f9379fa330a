"""Python, the packages that every run needs, and the optional ones."""

from __future__ import annotations

import platform
import sys
from importlib import metadata, util

from bench.doctor.finding import Finding

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
    "zstandard",
    "nvtx",
)
_EXTRAS = (
    ("gpu", "nvidia-ml-py", "names, memory, clocks and power caps of GPUs in every record"),
    ("gpu", "transformer-engine", "FP8 layers and quantised weights of Transformer Engine"),
    ("fp8", "torchao", "float8 weights and gathers of torchao"),
    ("", "megatron-fsdp", "the engine megatron_fsdp, on CUDA"),
    ("slurm", "submitit", "sweeps as jobs of a Slurm cluster: run --launcher slurm"),
    ("parquet", "pyarrow", "export --to parquet"),
    ("safetensors", "safetensors", "checkpoints in the safetensors format"),
)


def package_findings() -> list[Finding]:
    """Packages by their metadata: none of them is loaded."""
    return [_python(), *(_needed(name) for name in _NEEDED), _core(), *map(_extra, _EXTRAS)]


def _python() -> Finding:
    wanted = ".".join(map(str, _MINIMUM_PYTHON))
    found = platform.python_version()
    if sys.version_info >= _MINIMUM_PYTHON:
        return Finding("ok", "python", found)
    return Finding("problem", "python", found, "every run", f"install Python {wanted} or later")


def _needed(name: str) -> Finding:
    version = version_of(name)
    if version is not None:
        return Finding("ok", name, version)
    return Finding("problem", name, "missing", "every run needs it", "install mfsdp-bench again")


def _core() -> Finding:
    core = util.find_spec("mfsdp_core")
    if core is not None and core.origin:
        return Finding("ok", "mfsdp_core", core.origin)
    remedy = "install mfsdp-bench again"
    return Finding("problem", "mfsdp_core", "missing", "the engine mfsdp", remedy)


def _extra(extra: tuple[str, str, str]) -> Finding:
    group, name, gives = extra
    version = version_of(name)
    if version is not None:
        return Finding("ok", name, version)
    extra_command = f"pip install 'mfsdp-bench[{group}]'"
    remedy = extra_command if group else f"pip install --no-deps {name}==0.6.1 einops"
    return Finding("note", name, "not installed", gives, remedy)


def version_of(name: str) -> str | None:
    """Version of an installed package, None if it is not."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
