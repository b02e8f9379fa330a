"""What `env.json` says about the machine, the software and the settings behind a run."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.launch.code import installed_version
from bench.launch.command import launch_variables
from bench.launch.git import git_state
from bench.launch.protocol import Order
from bench.launch.rank_entry.mfsdp_bench_rank import WORKER_VARIABLE
from bench.redaction import redact
from bench.resolve.environment_names import SETTABLE_PREFIXES
from bench.resolve.machine import Machine
from bench.store.run_folder import utc_now

PACKAGES = (
    "mfsdp-bench",
    "torch",
    "numpy",
    "pydantic",
    "psutil",
    "nvtx",
    "nvidia-ml-py",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "transformer-engine",
    "megatron-fsdp",
)
_LEFT_OUT = ("PYTHONPATH", WORKER_VARIABLE)
_SHOWN_PREFIXES = (*SETTABLE_PREFIXES, "KMP_", "SLURM_", "TORCHINDUCTOR_")
_CPUS = Path("/sys/devices/system/cpu")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def collect_environment(order: Order) -> dict[str, Any]:
    """Facts found without torch, as plain JSON data; what cannot be found is None.

    The versions that only a rank knows (CUDA, the NCCL that was loaded) are in its runtime.json,
    which a reader gets as the entry `runtime`.
    """
    machine, code = Machine.detect(), order.code
    added = launch_variables(order, os.environ)
    return {
        "collected_utc": utc_now(),
        "hostname": machine.hostname,
        "platform": platform.platform(),
        "cpu_name": machine.cpu_name,
        "cpu_count": machine.cpu_count,
        "memory_bytes": machine.memory_bytes,
        "cpu_affinity": sorted(os.sched_getaffinity(0)),
        "cpu_governors": cpu_governors(),
        # Over the last minute, before this run: what else the machine was doing.
        "load_average_before": round(os.getloadavg()[0], 2),
        "cuda_devices": [
            {"name": gpu.name, "uuid": gpu.uuid, "memory_bytes": gpu.memory_bytes}
            for gpu in machine.cuda_devices
        ],
        "nvidia_driver": _first_line(_NVIDIA_DRIVER),  # its own line about its version
        "python": code.versions()[1],
        "packages": dict(code.pinned.versions) if code.pinned else package_versions(),
        "git": git_state(code.root),
        "argv": sys.argv,
        "variables": shown_variables(os.environ),
        "set_by_launch": redact({k: v for k, v in added.items() if k not in _LEFT_OUT}),
    }


def cpu_governors(folder: Path = _CPUS) -> list[str]:
    """The frequency governors of the cores, each once; empty where the system shows none."""
    governors = (_first_line(path) for path in folder.glob("cpu[0-9]*/cpufreq/scaling_governor"))
    return sorted({governor for governor in governors if governor})


def package_versions() -> dict[str, str]:
    """Versions of the packages that can change a number, of those that are installed."""
    return {name: version for name in PACKAGES if (version := installed_version(name))}


def shown_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    """The variables of the allow-list, without what looks like a secret."""
    shown = {name: value for name, value in variables.items() if name.startswith(_SHOWN_PREFIXES)}
    redacted: dict[str, Any] = redact(dict(sorted(shown.items())))
    return redacted


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return None
