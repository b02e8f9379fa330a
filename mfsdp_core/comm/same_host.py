"""Direct exchange between ranks of one host: each reads what it needs in the others' memory.

One copy by the rank that wants the bytes, instead of two through a socket by threads that have to
be woken. Sums are those of `point_to_point`, to the last bit, taken stretch by stretch: what has
just been read is added up while it lies in the cache, so reductions need next to no memory.

Sums are taken when a peer is ready, at any time and on any thread of the process. They are part of
the transport, as gloo's are: no dispatch mode sees them, and counts of operations stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from mfsdp_core.comm import peer_memory
from mfsdp_core.comm.host_links import Addresses, Exchange, HostLinks
from mfsdp_core.comm.point_to_point import PointToPointCommunicator, sum_dtype, sum_in_order
from mfsdp_core.comm.protocol import Done, PendingSum, Scratch, Summed
from mfsdp_core.events import Event, EventBus
from mfsdp_core.streams import Streams, Work

#: Bytes that are read and added up at a time.
STRETCH_BYTES = 1 << 18
_NOTHING = torch.empty(0, dtype=torch.uint8)


class SameHostCommunicator(PointToPointCommunicator):
    """A `Communicator` over the links of its group."""

    transport = "same_host"
    takes_scratch = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        role: str,
        events: EventBus,
        streams: Streams,
        scratch: Scratch,
        *,
        links: HostLinks,
    ) -> None:
        super().__init__(group, role, events, streams, scratch)
        self._links = links
        self._pids = {peer.rank: peer.pid for peer in links.peers}
        self._scratch_name = f"(sums of {role})"
        self._memory = _NOTHING
        self._sums = 0

    def all_reduce(self, full: torch.Tensor, bucket: str, *, average: bool) -> PendingSum:
        """Replace `full` by its sum (or mean) over ranks, rounded once to its dtype."""
        if self.size == 1:
            return Summed(full, Done())
        self._publish("all_reduce", full, bucket)
        parts = full.tensor_split(self.size)
        second = _Second()
        tag = self._gather_tag(bucket)

        def gather() -> None:
            # A rank that posts its sum has read what it needed of the other slices here.
            others = [peer for peer in range(self.size) if peer != self.rank]
            (second.work,) = self._start(others, [parts[self.rank]] * self.size, parts, tag)

        first = self._post_sum(parts, parts[self.rank], bucket, average=average, then=gather)
        name = f"all_reduce of {bucket}"
        works = (first, second)
        return Summed(full, self._streams.track(works, name, self._group, reads=(), writes=(full,)))

    def _start(
        self,
        others: list[int],
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        tag: int,
    ) -> Sequence[Work]:
        def read(addresses: Addresses) -> None:
            for peer in others:
                self._read(peer, addresses[peer], incoming[peer])

        wanted = {peer: incoming[peer].nbytes for peer in others}
        return (self._links.post(tag, {peer: outgoing[peer] for peer in others}, wanted, read),)

    def _read(self, peer: int, address: int, into: torch.Tensor) -> None:
        peer_memory.read(self._pids[peer], address, into)
        if self._events.wants("read"):
            dtype = str(into.dtype).removeprefix("torch.")
            event = Event("read", "read", dtype, into.nbytes, self.role, self.size, "")
            self._events.publish(event)

    def _sum_slices(
        self, full: torch.Tensor, bucket: str, *, average: bool, out: torch.Tensor | None = None
    ) -> PendingSum:
        parts, dtype = full.tensor_split(self.size), sum_dtype(full.dtype)
        if out is None or out.dtype != dtype:
            out = parts[self.rank].new_empty(parts[self.rank].shape, dtype=dtype)
        work = self._post_sum(parts, out, bucket, average=average)
        name = f"reduction of {bucket}"
        return Summed(
            out, self._streams.track((work,), name, self._group, reads=(full,), writes=(out,))
        )

    def _post_sum(
        self,
        parts: Sequence[torch.Tensor],
        out: torch.Tensor,
        bucket: str,
        *,
        average: bool,
        then: Callable[[], None] = lambda: None,
    ) -> Work:
        """Offer every rank its slice, and add up slice `rank` of all ranks into `out`."""
        mine = parts[self.rank]
        tag = self._tag(self._reductions, bucket) + 1
        self._reductions += 1
        stretches = self._acquire_stretches()

        def add_up(addresses: Addresses) -> None:
            with torch._C._DisableTorchDispatch():
                add_up_stretches(addresses)
            then()

        def add_up_stretches(addresses: Addresses) -> None:
            step = STRETCH_BYTES // mine.itemsize
            room = [stretch.view(mine.dtype) for stretch in stretches]
            for start in range(0, mine.numel(), step):
                own, target = mine[start : start + step], out[start : start + step]
                received = []
                for (peer, address), memory in zip(sorted(addresses.items()), room, strict=True):
                    received.append(memory[: own.numel()])
                    offset = start * mine.itemsize
                    self._read(peer, address + offset, received[-1])
                contributions = [*received[: self.rank], own, *received[self.rank :]]
                total = sum_in_order(contributions, target)
                if average:
                    total.div_(self.size)
                if total is not target:
                    target.copy_(total)

        offered = {peer: part for peer, part in enumerate(parts) if peer != self.rank}
        wanted = dict.fromkeys(offered, mine.nbytes)
        return _Sum(self._links.post(tag, offered, wanted, add_up), self._release_stretches)

    def _acquire_stretches(self) -> list[torch.Tensor]:
        """Memory for one stretch of every other rank, the same for all sums under way."""
        if not self._sums:
            size_bytes = (self.size - 1) * STRETCH_BYTES
            self._memory = self._scratch.acquire(self._scratch_name, size_bytes, torch.uint8)
        self._sums += 1
        return list(self._memory.split(STRETCH_BYTES))

    def _release_stretches(self) -> None:
        self._sums -= 1
        if not self._sums:
            self._scratch.release(self._scratch_name, self._memory)
            self._memory = _NOTHING


class _Sum:
    """A sum under way. after: called once, when it has been waited for."""

    def __init__(self, exchange: Exchange, after: Callable[[], None]) -> None:
        self._exchange = exchange
        self._after = after

    def wait(self) -> None:
        """Return when it is there and all ranks have read what they need of it."""
        self._exchange.wait()
        self._after()


class _Second:
    """The second half of an all-reduce; `work` is there when the first half is over."""

    work: Work

    def wait(self) -> None:
        """Return when it is over."""
        self.work.wait()
