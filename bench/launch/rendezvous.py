"""Where the agents of several nodes meet, handed down to each of them by environment variables.

Nodes have fixed numbers, so that ranks are laid out node by node: rank = node x ranks per node +
local rank. torchrun's own static rendezvous does the rest. Torch-free.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import psutil

RENDEZVOUS_VARIABLE: Final = "MFSDP_BENCH_RENDEZVOUS"
NODE_VARIABLE: Final = "MFSDP_BENCH_NODE"
# What the node is called in records, where it is not Slurm that names it.
NODE_NAME_VARIABLE: Final = "MFSDP_BENCH_NODE_NAME"
# Slurm numbers the tasks of a step; with one task per node that is the number of the node.
_NODE_VARIABLES = (NODE_VARIABLE, "SLURM_PROCID")


@dataclass(frozen=True)
class Rendezvous:
    """`address` and `port` are on node 0; `nodes` is how many agents come."""

    address: str
    port: int
    nodes: int

    @classmethod
    def at(cls, address: str, nodes: int) -> Self:
        """On a port of this machine that the kernel found free."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return cls(address, int(probe.getsockname()[1]), nodes)

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Self | None:
        """What `variables` of the launcher said; None for a run on one node."""
        stated = variables.get(RENDEZVOUS_VARIABLE)
        if not stated:
            return None
        address, port, nodes = stated.rsplit(":", 2)
        return cls(address, int(port), int(nodes))

    def variables(self) -> dict[str, str]:
        """For the environment of every agent."""
        return {RENDEZVOUS_VARIABLE: f"{self.address}:{self.port}:{self.nodes}"}

    def torchrun_arguments(self, node: int) -> list[str]:
        """For the agent of node `node`."""
        return [
            f"--nnodes={self.nodes}",
            f"--node-rank={node}",
            f"--master-addr={self.address}",
            f"--master-port={self.port}",
        ]

    def interface(self) -> str | None:
        """Name of the network interface by which this node reaches node 0; None if it is unknown.

        gloo would take the one that the host name resolves to, which on many machines is loopback.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((self.address, self.port))  # sends nothing
            except OSError:
                return None
            own = str(probe.getsockname()[0])
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address == own for address in addresses):
                return str(name)
        return None


def node_number(variables: Mapping[str, str] = os.environ) -> int:
    """Number of this node within the run, from 0."""
    numbers = (variables.get(name) for name in _NODE_VARIABLES)
    return int(next((value for value in numbers if value), "0"))
