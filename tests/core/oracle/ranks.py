"""A pool of gloo ranks that outlives single tests, so that one launch serves many cases.

The pool's ranks form a world of `WORLD` processes. Data-parallel groups of 1, 2 and 4 ranks are cut
out of it as the inner axis of a mesh ("replica", "dp"). With `dp` = 2 the second half of the world
would do what the first one does; it leaves at the call of `mesh`, and counts as having returned the
same. A test sends a function; every rank runs it and sends back
what it returned. A rank that raises, dies or outlives the time limit ends the pool's ranks (a
half-finished collective leaves gloo unusable); the next call starts new ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.testing.call import FunctionCall
from bench.testing.workers import ForkServer, Workers, WorkersError

WORLD = 4
GROUP_SIZES = (1, 2, 4)
#: Each group has a thread that polls, also when nobody uses it: ranks with more start anew.
_MOST_GROUPS = 60

#: One or more ranks raised, died or hung; the message holds what each of them said.
RankFailureError = WorkersError

_meshes: dict[int, DeviceMesh] = {}


class _OtherReplica(BaseException):
    """Raised by `mesh` in ranks that would repeat what the first `group_size` ranks do."""

    def __init__(self, group_size: int) -> None:
        super().__init__(group_size)
        self.group_size = group_size


@dataclass(frozen=True)
class _Returned:
    """A result. repeats: it is that of the rank with the same index in the first so many ranks.

    groups: process groups so far, in all and those named by their number, which torch takes to be
    the same on all ranks when it makes the next one.
    """

    value: Any
    repeats: int
    groups: tuple[int, int]


def mesh(group_size: int) -> DeviceMesh:
    """In a rank: the mesh whose `dp` axis has `group_size` ranks; both axes are named.

    Returns in the first `group_size` ranks of the world alone.
    """
    if dist.get_rank() >= group_size:
        raise _OtherReplica(group_size)
    return _meshes[group_size]


def mesh_of_every_replica(group_size: int) -> DeviceMesh:
    """In a rank: as `mesh`, on all ranks, for functions that use several group sizes in turn."""
    return _meshes[group_size]


@cache
def two_axes(outer_ranks: int = 2) -> tuple[DeviceMesh, Any]:
    """In a rank: the world as `outer_ranks` rows of inner groups, and the group over both axes."""
    shape = (outer_ranks, WORLD // outer_ranks)
    axes = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    return axes, axes["outer", "inner"]._flatten("outer_inner").get_group()


def on_two_axes(outer: str | int = 0, outer_ranks: int = 2) -> dict[str, Any]:
    """In a rank: arguments that shard over `two_axes`, by this strategy along the outer one."""
    axes, group = two_axes(outer_ranks)
    return {
        "device_mesh": axes,
        "dp_shard_dim": "inner",
        "dp_outer_dim": "outer",
        "hybrid_fsdp_group": group,
        "outer_dp_sharding_strategy": outer,
    }


def enter_world() -> None:
    """In a new rank: warnings are errors, and the meshes of all group sizes exist."""
    warnings.simplefilter("error")
    for size in GROUP_SIZES:
        _meshes[size] = init_device_mesh(
            "cpu", (WORLD // size, size), mesh_dim_names=("replica", "dp")
        )


def enter_devices() -> None:
    """In one of two new ranks that have CUDA devices: the mesh of both."""
    _meshes[2] = init_device_mesh("cuda", (1, 2), mesh_dim_names=("replica", "dp"))


def call_once(call: FunctionCall) -> _Returned:
    """In a rank: what the function returns, unless another rank does the same.

    It draws the same numbers whatever ran on this rank before.
    """
    torch.manual_seed(0)
    value, repeats = None, WORLD
    try:
        with warnings.catch_warnings():  # a test may change filters
            value = call.run()
    except _OtherReplica as other:
        repeats = other.group_size
    world = distributed_c10d._world
    return _Returned(value, repeats, (len(world.pg_names), world.group_count))


class RankPool:
    """Forks its ranks at the first `run`, ends them at `close` or at the first failure."""

    def __init__(self, server: ForkServer) -> None:
        self._workers = Workers(server, WORLD, prepare=enter_world)

    def run(
        self, function: Callable[..., Any], *arguments: Any, seconds: float = 60.0
    ) -> list[Any]:
        """Runs `function(*arguments)` on all ranks, returns the results in rank order.

        `function` is a module-level function of a test file or of this package.
        """
        call = FunctionCall.of(function, arguments)
        results = self._workers.run(call_once, call, seconds=seconds)
        if len({found.groups for found in results}) > 1 or results[0].groups[0] > _MOST_GROUPS:
            # A group that some ranks made alone: the next one of all ranks would never meet.
            self._workers.end()
        return [results[rank % found.repeats].value for rank, found in enumerate(results)]

    @property
    def pids(self) -> list[int]:
        """Process ids of the living ranks; empty when none is started."""
        return self._workers.pids

    def close(self) -> None:
        """Ends every rank."""
        self._workers.end()
