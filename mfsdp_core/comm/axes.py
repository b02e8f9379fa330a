"""The communicators of one model, by what they are for."""

from __future__ import annotations

from dataclasses import dataclass

from mfsdp_core.comm.torch_backend import Communicator


@dataclass(frozen=True)
class AxisCommunicators:
    """One communicator per purpose.

    inner: reductions along the sharding axis. gather: all-gathers along it (may be the same group).
    outer: the second data-parallel axis of hybrid sharding, None on a one-dimensional mesh.
    """

    inner: Communicator
    gather: Communicator
    outer: Communicator | None

    def transports(self) -> dict[str, str]:
        """By role of the group: what carries its bytes."""
        named = {"inner": self.inner, "gather": self.gather, "outer": self.outer}
        return {
            name: one.transport
            for name, one in named.items()
            if one is not None and (name != "gather" or one is not self.inner)
        }
