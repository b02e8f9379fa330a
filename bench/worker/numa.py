"""Which processors a rank runs on: those of its NUMA node, where the machine has several.

Memory that a rank touches first lies there too. Without this the kernel moves a rank's threads
between sockets, and a device's queue is fed from the far one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch

_SYSTEM: Final = Path("/sys")
_SEVERAL: Final = 2


def bind_to_node(
    device: torch.device, local_rank: int, local_ranks: int, threads: int, system: Path = _SYSTEM
) -> int | None:
    """Keep this process on one node; its number, None where it stays unchanged.

    A rank of a device goes to the device's node, others spread in equal blocks. Nothing happens on
    a machine of one node, where this process may use processors of one alone, or where `threads`
    would share fewer processors.

    Args:
        device: that the rank computes on.
        local_rank: among `local_ranks` on this machine.
        local_ranks: see above.
        threads: that the rank computes with.
        system: where the kernel tells of nodes and devices.
    """
    allowed = os.sched_getaffinity(0)
    nodes = {node: cpus & allowed for node, cpus in _nodes(system).items() if cpus & allowed}
    if len(nodes) < _SEVERAL:
        return None
    if device.type == "cuda":
        chosen = _node_of(device, system)
    else:
        chosen = sorted(nodes)[local_rank * len(nodes) // local_ranks]
    if chosen is None or len(nodes.get(chosen, ())) < threads:
        return None
    os.sched_setaffinity(0, nodes[chosen])
    return chosen


def _nodes(system: Path) -> dict[int, set[int]]:
    """Processors by node."""
    nodes = {}
    for folder in (system / "devices/system/node").glob("node[0-9]*"):
        try:
            text = (folder / "cpulist").read_text(encoding="ascii")
        except OSError:
            continue
        nodes[int(folder.name.removeprefix("node"))] = _numbers(text.strip())
    return nodes


def _numbers(text: str) -> set[int]:
    """Of `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _node_of(device: torch.device, system: Path) -> int | None:
    """The node that a device's slot belongs to, as the kernel knows it."""
    facts: Any = torch.cuda.get_device_properties(device)
    try:
        slot = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        node = int((system / "bus/pci/devices" / slot / "numa_node").read_text(encoding="ascii"))
    except (AttributeError, OSError, ValueError):  # a torch that does not say, or no such file
        return None
    return node if node >= 0 else None
