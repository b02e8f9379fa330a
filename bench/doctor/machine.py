"""The machine itself: processor, memory, shared memory, open files."""

from __future__ import annotations

import platform
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.doctor.finding import DoctorFinding
from bench.launch.environment import cpu_governors
from bench.resolve import Machine

_SHARED_MEMORY = Path("/dev/shm")
_ENOUGH_SHARED_BYTES = 2**30
_ENOUGH_OPEN_FILES = 4096


def machine_findings(machine: Machine) -> list[DoctorFinding]:
    """What decides how fast, and how evenly, a run can be here."""
    return [
        DoctorFinding("ok" if sys.platform == "linux" else "note", "system", platform.platform()),
        DoctorFinding(
            "ok", "processor", f"{machine.cpu_count} cores, {machine.cpu_name or 'unknown'}"
        ),
        DoctorFinding("ok", "memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
        _devices(machine),
        governor(cpu_governors()),
        shared_memory(_SHARED_MEMORY),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
    ]


def _devices(machine: Machine) -> DoctorFinding:
    names = machine.cuda_device_names
    if names:
        return DoctorFinding("ok", "CUDA devices", ", ".join(names))
    return DoctorFinding(
        "note",
        "CUDA devices",
        "none",
        "runs on GPUs; without one, cells with launch.device cuda are pruned",
        "a machine with an NVIDIA GPU and its driver; inside a container, --gpus all",
    )


def governor(found: Sequence[str]) -> DoctorFinding:
    """Whether the cores keep one frequency."""
    if not found:
        return DoctorFinding("ok", "processor clocks", "the system shows no frequency governor")
    if list(found) == ["performance"]:
        return DoctorFinding("ok", "processor clocks", "governor performance")
    return DoctorFinding(
        "note",
        "processor clocks",
        f"governor {', '.join(found)}: cores change their frequency",
        "a smaller noise floor of CPU runs",
        "sudo cpupower frequency-set -g performance",
    )


def shared_memory(folder: Path) -> DoctorFinding:
    """Size of the memory through which processes of one machine exchange data."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        found, enough = f"no {folder}", False
    else:
        found = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB in {folder}"
        enough = usage.free >= _ENOUGH_SHARED_BYTES
    if enough:
        return DoctorFinding("ok", "shared memory", found)
    return DoctorFinding(
        "note",
        "shared memory",
        found,
        "room for NCCL between ranks of one machine, which fails to start without",
        "docker run --shm-size=8g or --ipc=host; on a host, mount -o remount,size=8g /dev/shm",
    )


def open_files(soft: int, hard: int) -> DoctorFinding:
    """Each rank holds a socket to every other rank."""
    shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_OPEN_FILES:
        return DoctorFinding("ok", "open files", f"at most {shown}")
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    return DoctorFinding(
        "note",
        "open files",
        f"at most {shown} per process (ulimit -n)",
        "groups of many ranks: each holds sockets to the others",
        f"ulimit -n {most}",
    )
