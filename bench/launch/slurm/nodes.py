"""What a node of the cluster offers according to the controller, for planning elsewhere."""

from __future__ import annotations

import re

from bench.errors import UsageError
from bench.launch.slurm.controller import ask
from bench.launch.slurm.settings import SlurmSettings
from bench.resolve.cuda_devices import CudaDevice
from bench.resolve.machine import Machine

# gpu:h100:8(S:0-1), gpu:4
_GPUS = re.compile(r"\bgpu:(?:([A-Za-z0-9_.-]+):)?(\d+)")


def node_of_cluster(settings: SlurmSettings) -> Machine:
    """The largest node of the partition, and how many nodes that has.

    Raises:
        ControllerSilentError: Slurm does not answer.
        UsageError: it has no such partition.
    """
    partition = ["-p", settings.partition] if settings.partition else []
    shown = ask(["sinfo", "-h", *partition, "-o", "%P|%D|%c|%m|%G"])
    lines = [line.split("|") for line in shown.splitlines()]
    if not lines and settings.partition:
        there = ", ".join(sorted(set(ask(["sinfo", "-h", "-o", "%R"]).split())))
        raise UsageError(f"partition {settings.partition}: not on this cluster; it has {there}")
    if settings.partition is None:
        # An asterisk marks the default partition.
        lines = [line for line in lines if line[0].endswith("*")] or lines
    gpus = [found for line in lines if (found := _GPUS.search(line[4]))]
    most = max(gpus, key=lambda found: int(found[2]), default=None)
    devices = (CudaDevice(most[1] or "gpu"),) * int(most[2]) if most else ()
    return Machine(
        cpu_count=max((_number(line[2]) for line in lines), default=0),
        memory_bytes=max((_number(line[3]) for line in lines), default=0) * 2**20,
        cuda_devices=devices,
        cpu_name="",
        hostname=settings.partition or "cluster",
        nodes=sum(_number(line[1]) for line in lines),
    )


def _number(text: str) -> int:
    """`128+` of nodes that differ is at least 128."""
    return int(text.rstrip("+") or "0")
