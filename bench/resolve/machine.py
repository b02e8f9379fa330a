"""What this machine offers, found without loading torch (and without creating a CUDA context).

Or a machine that the user describes, to plan runs for another place.
"""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from bench.errors import UsageError
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


_CORES_PER_DEVICE = 8
_HOST_BYTES_PER_DEVICE = 128 * 2**30


class _Known(NamedTuple):
    """capability: of CUDA. memory_bytes: what the datasheet names, in powers of ten."""

    device_name: str
    capability: tuple[int, int]
    memory_bytes: int


#: By its name on the command line; datasheets of NVIDIA, and its list of compute capabilities.
KNOWN_DEVICES: Final = {
    "A100": _Known("NVIDIA A100-SXM4-80GB", (8, 0), 80 * 10**9),
    "L40S": _Known("NVIDIA L40S", (8, 9), 48 * 10**9),
    "H100": _Known("NVIDIA H100 80GB HBM3", (9, 0), 80 * 10**9),
    "H200": _Known("NVIDIA H200", (9, 0), 141 * 10**9),
    "B200": _Known("NVIDIA B200", (10, 0), 180 * 10**9),
}


def described_machine(device: str, gpus: int, gpus_per_node: int = 8) -> Machine:
    """`gpus` devices in nodes of `gpus_per_node`; fewer are one node.

    Raises:
        UsageError: an unknown device, or nodes that would not be full.
    """
    known = KNOWN_DEVICES.get(device.upper())
    if known is None:
        raise UsageError(f"--device {device}: expected one of {', '.join(KNOWN_DEVICES)}")
    in_node = min(gpus, gpus_per_node)
    if gpus % in_node:
        raise UsageError(f"--gpus {gpus}: expected whole nodes of {gpus_per_node}, or one node")
    one = CudaDevice(known.device_name, None, known.capability, known.memory_bytes)
    return Machine(
        cpu_count=_CORES_PER_DEVICE * in_node,
        memory_bytes=_HOST_BYTES_PER_DEVICE * in_node,
        cuda_devices=(one,) * in_node,
        hostname=f"{gpus} x {known.device_name}",
        nodes=gpus // in_node,
        described=True,
    )
