"""A backend around gloo whose `wait()` only orders, as NCCL's: its work is done on a late device.

Every group has a stream of its own, and each collective runs there behind what was enqueued when
it was issued. `wait()` lets the current stream wait for its end, and returns at once. Outside of a
late device it is gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

from late.device import Event, LateDevice, Started
from oracle.ranks import WORLD, mesh


class LateWork(dist.Work):
    """Holds its tensors until somebody waits for it, as NCCL's does."""

    def __init__(self, device: LateDevice, end: Event, tensors: Any) -> None:
        super().__init__()
        self._device = device
        self._end = end
        self._tensors = tensors

    def wait(self, _timeout: timedelta = timedelta(0)) -> bool:
        self._device.current.wait_for((self._end,))
        self._tensors = ()
        return True


class LateGroup(dist.ProcessGroup):
    """Its collectives are gloo's."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        host = dist.PrefixStore("host", store)
        self._of_host = dist.ProcessGroupGloo(host, rank, size, timeout)
        self._waiting = ThreadPoolExecutor()

    @property
    def group_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    def _get_backend(self, _device: torch.device) -> Any:
        return self._gloo

    def _issue(self, *calls: tuple[str, tuple[Any, ...]]) -> Any:
        """Calls of gloo that start together, and of which none has ended before all have."""
        device = LateDevice.now
        if device is None:
            return _start(self._gloo, calls)[-1]
        if any(device.is_of_host(one) for one in tree_leaves(calls) if isinstance(one, Tensor)):
            return _start(self._of_host, calls)[-1]
        with torch._C._DisableTorchDispatch():
            beneath = tree_map_only(Tensor, device.beneath, calls)

        def run() -> Started:
            # gloo's messages and reductions come to their end while somebody waits.
            works = _start(self._gloo, beneath)
            return self._waiting.submit(lambda: [work.wait() for work in works])

        stream = device.stream(f"group {self.group_name}")
        stream.wait_for(device.current.record())
        touches = [one for one in tree_leaves(beneath) if isinstance(one, Tensor)]
        device.enqueue(run, stream, touches=touches)
        return LateWork(device, stream.last(), calls)


def _start(gloo: Any, calls: Iterable[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    return [getattr(gloo, name)(*arguments) for name, arguments in calls]


def late_batch(operations: list[dist.P2POp]) -> list[dist.Work]:
    """`batch_isend_irecv` as NCCL's: one kernel, so one work for all of its messages."""
    calls = [(op.op.__name__[1:], ([op.tensor], op.group_peer, op.tag)) for op in operations]
    return [operations[0].group._issue(*calls)]


def _collective(name: str) -> Callable[..., Any]:
    def issue(group: LateGroup, *arguments: Any) -> Any:
        return group._issue((name, arguments))

    return issue


_COLLECTIVES = ("allreduce", "broadcast", "allgather", "_allgather_base", "_reduce_scatter_base")
for _name in (*_COLLECTIVES, "send", "recv"):
    setattr(LateGroup, _name, _collective(_name))
# torch 2.13 renamed two of them.
LateGroup.all_gather_single = LateGroup._allgather_base
LateGroup.reduce_scatter_single = LateGroup._reduce_scatter_base
dist.Backend.register_backend("late", LateGroup, devices=["cpu"])


@cache
def late_group(*ranks: int) -> Any:
    """In a rank: a group of these, made by all ranks of the world."""
    return dist.new_group(list(ranks), backend="late")


def late_mesh(ranks: int) -> DeviceMesh:
    """In a rank: the first ranks of the world along the axis `dp`. Returns in those alone."""
    group = late_group(*range(ranks))
    mesh(ranks)
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))


@cache
def late_axes() -> tuple[DeviceMesh, Any]:
    """In a rank: the world as two outer by two inner ranks, and a group over both axes."""
    half = WORLD // 2
    inner = [late_group(*range(first, first + half)) for first in (0, half)]
    outer = [late_group(first, first + half) for first in range(half)]
    rank = dist.get_rank()
    axes = DeviceMesh.from_group(
        [outer[rank % half], inner[rank // half]],
        "cpu",
        mesh=torch.arange(WORLD).view(2, half),
        mesh_dim_names=("outer", "inner"),
    )
    return axes, late_group(*range(WORLD))
