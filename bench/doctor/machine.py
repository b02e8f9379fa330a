"""The machine itself: processor, memory, clocks, shared memory, limits of processes."""

from __future__ import annotations

import contextlib
import ctypes
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
_PIDS_LIMIT = Path("/sys/fs/cgroup/pids.max")
_ENOUGH_PROCESSES = 4096
# adjtimex(2): struct timex is 208 bytes on 64-bit Linux; maxerror is its third long, in
# microseconds; 5 (TIME_ERROR) is the answer of a clock that nothing keeps in step.
_TIMEX_LONGS = 26
_NOT_SYNCHRONISED = 5


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
        _system_clock(),
        shared_memory(_SHARED_MEMORY),
        *limits(),
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


def _system_clock() -> DoctorFinding:
    try:
        words = (ctypes.c_long * _TIMEX_LONGS)()
        state = ctypes.CDLL(None, use_errno=True).adjtimex(words)
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        return DoctorFinding(
            "ok", "system clock", "the system does not say whether it is synchronised"
        )
    if state != _NOT_SYNCHRONISED:
        return DoctorFinding(
            "ok", "system clock", f"synchronised, within {words[3] / 1e3:.0f} ms at worst"
        )
    return DoctorFinding(
        "note",
        "system clock",
        "nothing keeps it synchronised",
        "times of several nodes that can be compared",
        "run chrony or systemd-timesyncd (on the host, where this is a container)",
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


def limits() -> list[DoctorFinding]:
    """Limits of this process, which ranks inherit."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    found = [open_files(files[0], files[1]), _locked_memory(locked), _processes()]
    if size != resource.RLIM_INFINITY:
        found.append(
            DoctorFinding(
                "note",
                "size of a file",
                f"at most {size / 2**20:.0f} MiB (ulimit -f)",
                "logs and samples that are not cut off",
                "ulimit -f unlimited",
            )
        )
    return found


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


def _locked_memory(soft: int) -> DoctorFinding:
    if soft == resource.RLIM_INFINITY:
        return DoctorFinding("ok", "locked memory", "unlimited")
    return DoctorFinding(
        "note",
        "locked memory",
        f"at most {soft / 2**20:.0f} MiB (ulimit -l)",
        "InfiniBand and RoCE between nodes, which register memory",
        "ulimit -l unlimited; for jobs, LimitMEMLOCK=infinity in the unit of slurmd or docker",
    )


def _processes() -> DoctorFinding:
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    known = [] if limit == resource.RLIM_INFINITY else [limit]
    with contextlib.suppress(OSError, ValueError):  # absent, or "max"
        known.append(int(_PIDS_LIMIT.read_text()))
    if not known:
        return DoctorFinding("ok", "processes", "unlimited")
    if min(known) >= _ENOUGH_PROCESSES:
        return DoctorFinding("ok", "processes", f"at most {min(known)}")
    return DoctorFinding(
        "note",
        "processes",
        f"at most {min(known)} processes and threads",
        "many ranks on one machine: each has tens of threads",
        "ulimit -u, or --pids-limit of the container",
    )
