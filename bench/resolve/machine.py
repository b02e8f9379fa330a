"""What this machine offers, found without loading torch (and without creating a CUDA context)."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.resolve.cuda_devices import CudaDevice, visible_cuda_devices

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
#: On x86 and on ARM.
_FLAGS = ("flags", "Features")


@dataclass(frozen=True)
class Machine:
    """The part of a machine that decides what can run on it; of a cluster, what one node offers.

    cpu_count: cores that this process may use (its affinity). memory_bytes: of the machine, or of
    the container if that has less. cuda_devices: the visible ones, in CUDA's numbering. nodes: how
    many such nodes a run may use. described: by the user, so installed packages are unknown.
    native_bf16: the processor has instructions for it; torch emulates it elsewhere, slowly.
    """

    cpu_count: int
    memory_bytes: int
    cuda_devices: tuple[CudaDevice, ...] = ()
    cpu_name: str = ""
    hostname: str = ""
    nodes: int = 1
    described: bool = False
    native_bf16: bool = True

    @property
    def cuda_device_names(self) -> tuple[str, ...]:
        """Name of each visible device, as `NVIDIA H100 80GB HBM3`."""
        return tuple(device.name for device in self.cuda_devices)

    @classmethod
    def detect(cls) -> Machine:
        """Inspect this machine. Never raises: what cannot be found counts as absent."""
        return cls(
            cpu_count=len(os.sched_getaffinity(0)),
            memory_bytes=_memory_bytes(),
            cuda_devices=visible_cuda_devices(),
            cpu_name=_cpu_name(),
            hostname=socket.gethostname(),
            native_bf16=bool({"avx512_bf16", "amx_bf16", "bf16"} & {*_of_cpu(*_FLAGS).split()}),
        )


def _memory_bytes() -> int:
    total: int = psutil.virtual_memory().total
    for file in _CGROUP_LIMITS:
        try:
            limit = int(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # absent, or "max"
        total = min(total, limit)
    return total


def _cpu_name() -> str:
    return _of_cpu("model name") or platform.processor() or platform.machine()


def _of_cpu(*keys: str) -> str:
    """What the kernel says of the first core under one of these keys."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() in keys), "")
