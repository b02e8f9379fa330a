"""CUDA devices by NVML where its binding is installed, else by the driver's files in /proc."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        return [_device_of(nvml, one, gpu) for gpu in handles for one in _instances(nvml, gpu)]
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
    found = []
    for index in range(most):
        with suppress(nvml.NVMLError):  # fewer than there may be
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
    return found


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
