"""The axes that one kind of parameters is sharded over, and the communicators along them.

A model has one such set for its dense parameters and, under expert parallelism, another one for its
experts: every expert lives on fewer ranks, whose mesh is another cut through the same world.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_core.comm.point_to_point import PointToPointCommunicator
from mfsdp_core.comm.torch_backend import Communicator, Scratch
from mfsdp_core.errors import CapabilityNotBuiltError
from mfsdp_core.events import EventBus
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.options import Options
from mfsdp_core.plan.strategy import AxisPlacements, Collective
from mfsdp_core.streams import Streams


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


@dataclass(frozen=True)
class DataParallelAxes:
    """A mesh, seen by one of its ranks.

    mesh: (inner,) or (outer, inner). whole: the mesh that shards are DTensors on, which is `mesh`
    with the tensor-parallel axis appended where there is one. gather_group: None, gathers share
    the inner axis' group. role_prefix: what the names of these groups in events begin with.
    hybrid_group: the ranks of both axes of `mesh`, where there are two.
    """

    mesh: DeviceMesh
    whole: DeviceMesh
    gather_group: dist.ProcessGroup | None = None
    role_prefix: str = ""
    hybrid_group: dist.ProcessGroup | None = None

    def group_of_all(self) -> dist.ProcessGroup:
        """One group over `ranks`; under tensor parallelism a new one, unless they are the world.

        Raises:
            CapabilityNotBuiltError: a new one of a part of the world, whose ranks are bound to
                devices: torch would split it off, and wait for all ranks of the world.
        """
        if self.whole.ndim == 1:
            return self.whole.get_group(0)
        if self.hybrid_group is not None and self.whole.ndim == self.mesh.ndim:
            return self.hybrid_group
        world: Any = dist.group.WORLD
        if len(self.ranks) == world.size():
            return world  # type: ignore[no-any-return] # torch says that it may be None
        if world.bound_device_id is not None:
            raise CapabilityNotBuiltError(
                f"a checkpoint of ranks {self.ranks} of {world.size()}, with tensor parallelism, "
                "needs a group of them, which torch would split off the world: all its ranks would "
                "have to take part. Call init_process_group without device_id, or let the mesh "
                "hold all ranks."
            )
        group: dist.ProcessGroup = dist.new_group(self.ranks, use_local_synchronization=True)
        return group

    @property
    def data_group(self) -> dist.ProcessGroup:
        """One group over the data-parallel axes, without that of tensor parallelism."""
        return self.hybrid_group or self.mesh.get_group(0)

    @property
    def has_outer_axis(self) -> bool:
        """Whether the mesh has two axes, whatever their sizes."""
        return self.mesh.ndim == 2  # noqa: PLR2004 - outer and inner

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """Ranks along the tensor-parallel axis; None without one, whatever its size."""
        if self.whole.ndim == self.mesh.ndim:
            return None
        return self.whole.get_group(self.whole.ndim - 1)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """One per axis of `whole`; sums over one after another reach every rank."""
        return tuple(self.whole.get_group(dim) for dim in range(self.whole.ndim))

    def named_groups(self) -> list[tuple[str, dist.ProcessGroup]]:
        """Groups that carry weights and gradients, by what they are for."""
        named = [("inner", self.mesh.get_group(self.mesh.ndim - 1))]
        if self.gather_group is not None:
            named.append(("gather", self.gather_group))
        if self.has_outer_axis:
            named.append(("outer", self.mesh.get_group(0)))
        return named

    @property
    def ranks(self) -> list[int]:
        """Global ranks of `whole`, ascending."""
        found: list[int] = sorted(self.whole.mesh.flatten().tolist())
        return found

    def coordinate(self) -> Coordinate:
        """This rank's coordinate on `mesh`."""
        inner = self.mesh.ndim - 1
        return Coordinate(
            inner_rank=self.mesh.get_local_rank(inner),
            inner_size=self.mesh.size(inner),
            outer_rank=self.mesh.get_local_rank(0) if self.has_outer_axis else 0,
            outer_size=self.mesh.size(0) if self.has_outer_axis else 1,
            has_outer_axis=self.has_outer_axis,
        )

    def communicators(
        self,
        options: Options,
        scratch: Scratch,
        *,
        events: EventBus,
        streams: Streams,
    ) -> AxisCommunicators:
        """One per purpose; all publish to `events`. Collective.

        `auto` on gloo exchanges directly where gradients are scattered (`point_to_point`). Where
        they are all-reduced, `native` stays: the second half of a direct exchange cannot overlap
        with the backward pass, and sums of more than two ranks would change in their last bits.
        Sums that are wider than the wire are exchanged directly on any backend.
        """
        transport, strategy = options.transport, options.strategy

        def over(group: dist.ProcessGroup, role: str, axis: AxisPlacements) -> Communicator:
            role = self.role_prefix + role
            scatters = axis.reduction is not Collective.ALL_REDUCE
            automatic = transport == "auto" and dist.get_backend(group) == "gloo"
            if not options.exchanges:
                return Communicator(group, role, events, streams)
            direct = PointToPointCommunicator(group, role, events, streams, scratch)
            if transport == "point_to_point" or (automatic and scatters):
                return direct
            return Communicator(group, role, events, streams, direct)

        groups = dict(self.named_groups())
        gather = inner = over(groups["inner"], "inner", strategy.inner)
        if "gather" in groups:
            gather = over(groups["gather"], "inner", strategy.inner)
        outer = over(groups["outer"], "outer", strategy.outer) if "outer" in groups else None
        return AxisCommunicators(inner, gather, outer)
