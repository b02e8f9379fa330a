"""Collectives through torch.distributed, on any backend and device type it supports.

A group of one communicates nothing: its buffers are already what the collective would make of them
(save a copy where `own` lies apart). Scaling and landing are the caller's and happen all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mfsdp_core.comm.rendezvous import UnitRendezvous
from mfsdp_core.events import Event, EventBus
from mfsdp_core.streams import InFlight, Streams

# torch 2.13 renamed the two flat collectives; 2.11 has only the older names.
_gather_flat: Callable[..., dist.Work] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_scatter_flat: Callable[..., dist.Work] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of `dtype` without its prefix, as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch calls `name`, as `bfloat16`."""
    found: torch.dtype = getattr(torch, name)
    return found


class Pending(Protocol):
    """A collective that was issued."""

    def wait(self) -> Any:
        """Return the result once it may be used on the current stream (CPU: once it is there).

        That is the tensor that the caller named; of a reduction perhaps one of higher precision.
        """


class Done:
    """A collective that needed no communication."""

    def __init__(self, result: torch.Tensor | None = None) -> None:
        self._result = result

    def wait(self) -> torch.Tensor | None:
        """Return at once."""
        return self._result


class Block(Protocol):
    """Memory that a transport needs while a collective is under way: flat, contents undefined."""

    data: torch.Tensor

    def give(self) -> None:
        """Give it back."""


#: By bucket, number of elements and dtype.
Scratch = Callable[[str, int, torch.dtype], Block]


class Communicator:
    """Collectives over the ranks of one process group, along one mesh axis.

    Buffers are one-dimensional and contiguous; `full` has `size` equal slices and `own` is slice
    `rank` of it, either in place (a view of `full`) or apart. `bucket` names the buffer in events,
    `role` the group. transport: what carries the bytes.
    takes_scratch: reductions hold as much memory of their own as arrives, while they are under way;
    sums that are wider than the wire do on any backend.
    `total` is the dtype in which reductions add up; see [Note: one rounding] of `plan.options`.
    wide_sums: takes the sums that are wider than the wire, which no backend does.
    """

    transport = "native"
    takes_scratch = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        role: str,
        events: EventBus,
        streams: Streams,
        wide_sums: Communicator | None = None,
    ) -> None:
        self.size = group.size()
        self.rank = group.rank()
        self._group = group
        self.role = role
        self._events = events
        self._streams = streams
        self._wide_sums = wide_sums
        self._rendezvous = UnitRendezvous(group, streams.device)
        # Events are frozen, and a bucket's are the same in every step.
        self._published: dict[tuple[str, str, torch.dtype, int], Event] = {}

    def rendezvous(self, bucket: str) -> None:
        """Before a gather that other ranks may not make: see [Note: gathering again]."""
        if self.size > 1:
            self._rendezvous.wait(bucket)

    def all_gather(self, full: torch.Tensor, own: torch.Tensor, bucket: str) -> Pending:
        """Fill `full` with every rank's `own`."""
        if self.size == 1:
            if own.data_ptr() != full.data_ptr():
                full.copy_(own)
            return Done()
        self._publish("all_gather", full, bucket)
        work = _gather_flat(full, own, group=self._group, async_op=True)
        return self._streams.track((work,), f"all_gather of {bucket}", own, full)

    def reduce(
        self,
        full: torch.Tensor,
        own: torch.Tensor | None,
        bucket: str,
        *,
        average: bool,
        total: torch.dtype,
    ) -> Pending:
        """Put the sum (or mean) over ranks of slice `rank` of `full` into `own`.

        own None: replace `full` by that of all of it.
        """
        target, operation = (full, "all_reduce") if own is None else (own, "reduce_scatter")
        if self.size == 1:
            if target.data_ptr() != full.data_ptr():
                target.copy_(full)
            return Done(target)
        if total is not full.dtype:
            if self._wide_sums is None:
                raise NotImplementedError(
                    f"{self.transport} adds up in the dtype of the wire, {full.dtype}, not in "
                    f"{total}"
                )
            return self._wide_sums.reduce(full, own, bucket, average=average, total=total)
        self._publish(operation, full, bucket)
        how: Any = {
            "op": dist.ReduceOp.AVG if average else dist.ReduceOp.SUM,
            "group": self._group,
            "async_op": True,
        }
        work = dist.all_reduce(full, **how) if own is None else _scatter_flat(own, full, **how)
        return self._track(work, f"{operation} of {bucket}", full, target)

    def all_reduce_max(self, values: torch.Tensor, bucket: str) -> None:
        """Replace `values` by their maximum over ranks, such as absolute maxima for scales."""
        if self.size > 1:
            self._publish("all_reduce", values, bucket)
            work = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._track(work, f"all_reduce of maxima of {bucket}", values).wait()

    def broadcast(self, full: torch.Tensor, bucket: str) -> Pending:
        """Replace `full` by that of the group's first rank."""
        if self.size == 1:
            return Done()
        self._publish("broadcast", full, bucket)
        work = dist.broadcast(full, group_src=0, group=self._group, async_op=True)
        return self._track(work, f"broadcast of {bucket}", full)

    def _track(self, work: dist.Work | None, name: str, *tensors: torch.Tensor) -> InFlight:
        return self._streams.track(() if work is None else (work,), name, *tensors)

    def _publish(self, operation: str, full: torch.Tensor, bucket: str) -> None:
        if "collective" not in self._events.wanted:
            return
        key = (operation, bucket, full.dtype, full.nbytes)
        event = self._published.get(key)
        if event is None:
            where = (self.role, self.size, bucket)
            event = Event("collective", operation, dtype_name(full.dtype), full.nbytes, *where)
            self._published[key] = event
        self._events.publish(event)
