"""A machine that the user describes, to plan runs for another place."""

from __future__ import annotations

from typing import Final, NamedTuple

from bench.errors import UsageError
from bench.resolve.cuda_devices import CudaDevice
from bench.resolve.machine import Machine

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
