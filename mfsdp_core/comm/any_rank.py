"""Flags that are set where any rank has set them: one small reduction, waited for when read."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.events import Event, EventBus
from mfsdp_core.streams import InFlight, Streams


class AnyRank:
    """Flags of a fixed number, one byte each, over the ranks of `group`."""

    def __init__(
        self, group: dist.ProcessGroup, flags: int, streams: Streams, events: EventBus
    ) -> None:
        self._group = group
        self._flags = flags
        self._streams = streams
        self._events = events
        self._bits = torch.empty(0)
        self._work: InFlight | None = None

    def ask(self, unset: list[int]) -> None:
        """Start the reduction; `unset` are the flags that this rank has not set. Collective."""
        self._wait()
        self._bits = self._streams.ones_but(self._flags, unset)
        if self._group.size() > 1:
            self._publish()
            work = dist.all_reduce(
                self._bits, op=dist.ReduceOp.MAX, group=self._group, async_op=True
            )
            self._work = self._streams.track(
                (work,), "all_reduce of flags", self._group, reads=(), writes=(self._bits,)
            )

    def bits(self) -> torch.Tensor:
        """1 for every flag that any rank has set, on the device."""
        self._wait()
        return self._bits

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _publish(self) -> None:
        if "agreement" in self._events.wanted:
            self._events.publish(
                Event(
                    kind="agreement",
                    operation="all_reduce",
                    dtype=dtype_name(self._bits.dtype),
                    payload_bytes=self._flags,
                    group="",
                    group_size=self._group.size(),
                    bucket="",
                )
            )
