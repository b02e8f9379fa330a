"""Direct exchange between ranks of one host: each reads what it needs in the others' memory.

One copy by the rank that wants the bytes, instead of two through a socket by threads that have to
be woken. Sums are those of `point_to_point`, to the last bit, taken stretch by stretch: what has
just been read is added up while it lies in the cache, so reductions need next to no memory.

Sums are taken when a peer is ready, at any time and on any thread of the process. They are part of
the transport, as gloo's are: no dispatch mode sees them, and counts of operations stay exact.

What is summed up may lie in several tensors (`Parts`). A rank therefore sends a table of addresses,
which the others read first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from mfsdp_core.comm import peer_memory
from mfsdp_core.comm.host_connections import Addresses, Exchange, HostConnections
from mfsdp_core.comm.parts import Parts
from mfsdp_core.comm.point_to_point import PointToPointCommunicator, sum_in_order
from mfsdp_core.comm.protocol import Done, PendingSum, Scratch, Summed
from mfsdp_core.events import Event, EventBus
from mfsdp_core.streams import Streams, Work

#: Bytes that are read and added up at a time.
STRETCH_BYTES = 1 << 18
#: All-reductions under way that hold gradients which some rank has yet to read.
UNREAD_REDUCTIONS = 1
_NOTHING = torch.empty(0, dtype=torch.uint8)


class SameHostCommunicator(PointToPointCommunicator):
    """A `Communicator` over the connections of its group."""

    transport = "same_host"
    takes_scratch = False
    takes_parts = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        role: str,
        events: EventBus,
        streams: Streams,
        scratch: Scratch,
        *,
        connections: HostConnections,
    ) -> None:
        super().__init__(group, role, events, streams, scratch)
        self._connections = connections
        self._pids = {peer.rank: peer.pid for peer in connections.peers}
        self._scratch_name = f"(sums of {role})"
        self._memory = _NOTHING
        self._sums = 0
        self._unread: deque[Exchange] = deque()

    def all_reduce(
        self, full: torch.Tensor, bucket: str, *, average: bool, total: torch.dtype
    ) -> PendingSum:
        """Replace `full` by its sum (or mean) over ranks, rounded once to its dtype."""
        if self.size == 1:
            return Summed(full, Done())
        return self.all_reduce_parts(Parts.of(full), full, bucket, average=average, total=total)

    def all_reduce_parts(
        self,
        parts: Parts,
        full: torch.Tensor,
        bucket: str,
        *,
        average: bool,
        total: torch.dtype,
    ) -> PendingSum:
        """Put the sum (or mean) of all ranks' parts into `full`, rounded once to its dtype."""
        while len(self._unread) >= UNREAD_REDUCTIONS:
            self._unread.popleft().wait()
        self._publish("all_reduce", full, bucket)
        slices = full.tensor_split(self.size)
        second = _Second()
        tag = self._gather_tag(bucket)

        def gather() -> None:
            # A rank that sends its sum has read what it needed of the other slices here.
            others = [peer for peer in range(self.size) if peer != self.rank]
            (second.work,) = self._start(others, [slices[self.rank]] * self.size, slices, tag)

        own = slices[self.rank]
        first = self._post_sum(parts, own, bucket, average=average, total=total, then=gather)
        if not parts.is_scaled:
            self._unread.append(first.exchange)
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
        return (
            self._connections.send(tag, {peer: outgoing[peer] for peer in others}, wanted, read),
        )

    def _read(self, peer: int, address: int, into: torch.Tensor) -> None:
        peer_memory.read(self._pids[peer], address, into)
        if self._events.wants("read"):
            dtype = str(into.dtype).removeprefix("torch.")
            event = Event("read", "read", dtype, into.nbytes, self.role, self.size, "")
            self._events.publish(event)

    def _sum_slices(
        self,
        full: torch.Tensor,
        bucket: str,
        *,
        average: bool,
        total: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> PendingSum:
        return self._sum_parts(Parts.of(full), out, bucket, average=average, total=total)

    def reduce_parts(
        self,
        parts: Parts,
        out: torch.Tensor,
        bucket: str,
        *,
        average: bool,
        total: torch.dtype,
    ) -> PendingSum:
        """Sum (or mean) over ranks of slice `rank` of all parts, into `out` or one of `total`."""
        self._publish_bytes("reduce_scatter", parts.dtype, parts.elements, bucket)
        return self._sum_parts(parts, out, bucket, average=average, total=total)

    def _sum_parts(
        self,
        parts: Parts,
        out: torch.Tensor | None,
        bucket: str,
        *,
        average: bool,
        total: torch.dtype,
    ) -> PendingSum:
        if out is None or out.dtype != total:
            # Zeros, for what no tensor covers.
            out = torch.zeros(parts.elements // self.size, dtype=total, device="cpu")
        work = self._post_sum(parts, out, bucket, average=average, total=total)
        name = f"reduction of {bucket}"
        # The exchange keeps what is read for as long as it is.
        reads = parts.tensors if self._streams.observer is not None else ()
        return Summed(
            out, self._streams.track((work,), name, self._group, reads=reads, writes=(out,))
        )

    def _post_sum(
        self,
        parts: Parts,
        out: torch.Tensor,
        bucket: str,
        *,
        average: bool,
        total: torch.dtype,
        then: Callable[[], None] = lambda: None,
    ) -> _Sum:
        """Offer every rank all parts, and add up slice `rank` of those of all ranks into `out`."""
        tag = self._tag(self._reductions, bucket) + 1
        self._reductions += 1
        room = [memory.view(parts.dtype) for memory in self._acquire_stretches()]

        def add_up(addresses: Addresses) -> None:
            with torch._C._DisableTorchDispatch():
                self._add_up(parts, addresses, room, out, average=average, total=total)
            then()

        table = parts.table()
        others = [peer for peer in range(self.size) if peer != self.rank]
        offered, wanted = dict.fromkeys(others, table), dict.fromkeys(others, table.nbytes)
        return _Sum(self._connections.send(tag, offered, wanted, add_up), self._release_stretches)

    def _add_up(
        self,
        parts: Parts,
        addresses: Addresses,
        room: Sequence[torch.Tensor],
        out: torch.Tensor,
        *,
        average: bool,
        total: torch.dtype,
    ) -> None:
        """Read, scale and add up stretch by stretch, in rank order."""
        tables = {peer: self._read_table(peer, addresses[peer], parts) for peer in addresses}
        tables[self.rank] = parts.is_scaled, ()
        item_bytes = parts.dtype.itemsize
        # As `tensor_split` cuts: what an all-reduction cuts need not be even.
        length, longer = divmod(parts.elements, self.size)
        start = self.rank * length + min(self.rank, longer)
        end = start + length + (self.rank < longer)
        for index, first, last, begin in parts.stretches(start, end, STRETCH_BYTES // item_bytes):
            contributions = []
            for rank, memory in enumerate(room):
                is_scaled, starts = tables[rank]
                value = memory[: last - first]
                if rank == self.rank:
                    own = parts.tensors[index].view(-1)[first:last]
                    value = own if is_scaled else torch.mul(own, parts.scale, out=value)
                else:
                    self._read(rank, starts[index] + first * item_bytes, value)
                    if not is_scaled:
                        value.mul_(parts.scale)
                contributions.append(value)
            target = out[begin : begin + last - first]
            found = sum_in_order(contributions, total, target)
            if average:
                found.div_(self.size)
            if found is not target:
                target.copy_(found)

    def _read_table(self, peer: int, address: int, parts: Parts) -> tuple[bool, Sequence[int]]:
        found = torch.empty(1 + len(parts.tensors), dtype=torch.int64, device="cpu")
        peer_memory.read(self._pids[peer], address, found)
        is_scaled, *starts = found.tolist()
        return bool(is_scaled), starts

    def _acquire_stretches(self) -> list[torch.Tensor]:
        """Memory for one stretch of every rank, the same for all sums under way."""
        if not self._sums:
            size_bytes = self.size * STRETCH_BYTES
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
        self.exchange = exchange
        self._after = after

    def wait(self) -> None:
        """Return when it is there and all ranks have read what they need of it."""
        self.exchange.wait()
        self._after()


class _Second:
    """The second half of an all-reduce; `work` is there when the first half is over."""

    work: Work

    def wait(self) -> None:
        """Return when it is over."""
        self.work.wait()
