"""What this machine offers, found without loading torch (and without creating a CUDA context).

CUDA devices by NVML where its binding is installed, else by the driver's files in /proc. Or a
machine that the user describes, to plan runs for another place.
"""

from __future__ import annotations

import importlib
import os
import platform
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from bench.errors import UsageError

_PROC_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class CudaDevice:
    """One GPU. What could not be found out without NVML is None."""

    name: str
    uuid: str | None = None
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None

    @property
    def is_instance(self) -> bool:
        """Whether it is a part of a GPU, by MIG."""
        return self.uuid is not None and self.uuid.startswith("MIG-")


def visible_cuda_devices() -> tuple[CudaDevice, ...]:
    """The devices that CUDA would number 0, 1, ... in this process."""
    devices = _devices_by_nvml()
    if devices is None:
        devices = devices_by_proc(_PROC_GPUS)
    return choose_visible(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))


def choose_visible(devices: Sequence[CudaDevice], visible: str | None) -> tuple[CudaDevice, ...]:
    """Apply the value of CUDA_VISIBLE_DEVICES (None: not set) the way the CUDA driver does.

    Entries are indices or starts of UUIDs; the first entry that names no device ends the list, and
    a device named twice makes the whole list invalid. A process sees one instance of MIG at most.
    """
    if visible is None:
        return _one_instance(devices)
    chosen: list[CudaDevice] = []
    for entry in visible.split(","):
        device = _named(devices, entry.strip())
        if device is None:
            break
        if any(device is other for other in chosen):
            return ()
        chosen.append(device)
    return _one_instance(chosen)


def _one_instance(devices: Sequence[CudaDevice]) -> tuple[CudaDevice, ...]:
    first = next((device for device in devices if device.is_instance), None)
    return tuple(devices) if first is None else (first,)


def _named(devices: Sequence[CudaDevice], entry: str) -> CudaDevice | None:
    if entry.isdecimal():
        return devices[int(entry)] if int(entry) < len(devices) else None
    matches = [
        device for device in devices if entry and device.uuid and device.uuid.startswith(entry)
    ]
    return matches[0] if len(matches) == 1 else None


def devices_by_proc(root: Path) -> list[CudaDevice]:
    """Devices out of `<root>/<bus id>/information`; an empty list where there is no driver."""
    devices = []
    for file in sorted(root.glob("*/information")):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        fields = {
            key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
        }
        devices.append(
            CudaDevice(name=fields.get("Model") or "unknown", uuid=fields.get("GPU UUID"))
        )
    return devices


def _devices_by_nvml() -> list[CudaDevice] | None:
    """None where the binding or the driver's library is missing."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [
            _device_of(nvml, instance, gpu) for gpu in handles for instance in _instances(nvml, gpu)
        ]
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _instances(nvml: Any, gpu: Any) -> list[Any]:
    """The instances that MIG has cut a GPU into; the GPU itself without MIG."""
    try:
        if not nvml.nvmlDeviceGetMigMode(gpu)[0]:
            return [gpu]
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
    except nvml.NVMLError:  # too old for MIG
        return [gpu]
    devices = []
    for index in range(most):
        with suppress(nvml.NVMLError):  # fewer than there may be
            devices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
    return devices


def _device_of(nvml: Any, handle: Any, gpu: Any) -> CudaDevice:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(gpu)
    return CudaDevice(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        capability=(int(major), int(minor)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


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
    card = CudaDevice(known.device_name, None, known.capability, known.memory_bytes)
    return Machine(
        cpu_count=_CORES_PER_DEVICE * in_node,
        memory_bytes=_HOST_BYTES_PER_DEVICE * in_node,
        cuda_devices=(card,) * in_node,
        hostname=f"{gpus} x {known.device_name}",
        nodes=gpus // in_node,
        described=True,
    )
