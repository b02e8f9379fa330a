"""Collectives made of direct sends between the ranks, with the sum taken locally.

Every rank sends slice j to rank j and adds up what it receives, in rank order, in any dtype that
holds that of the wire: half-precision values that are added up in FP32 travel as they are and are
never rounded between two ranks (bit-reproducible on any backend). Each rank sends (n-1)/n of the
buffer, as under a ring.

On gloo this is also faster than its own flat collectives, which stage through buffers of their own
(README, Decisions). There messages carry a tag counted per operation, so gathers and reductions
need not be interleaved alike on all ranks, nor those of several models on one group. NCCL takes
tags and ignores them: messages meet in the order in which they were issued, as its collectives do.
`all_reduce` is a reduction of slices followed by their gather, which starts when the first half is
waited for.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mfsdp_core.comm.torch_backend import Communicator, Pending, Scratch
from mfsdp_core.events import EventBus
from mfsdp_core.streams import InFlight, Streams, Work

#: A tag is _FIRST_TAG + ((bucket * _OPERATIONS + operation) * _CHANNELS + channel) * 2, for
#: reductions 1 more: above what users count from zero, below the 31 bits of a signed integer.
#: Operations and channels wrap; buckets are known by a checksum of their names, so that what ranks
#: send by mistake for different buckets never meets.
_FIRST_TAG = 1 << 30
_BUCKETS = 1 << 12
_OPERATIONS = 1 << 9
_CHANNELS = 1 << 8
#: Channels of a group in the order in which its communicators are made, the same on all ranks.
_channels: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class PointToPointCommunicator(Communicator):
    """A communicator whose gathers and reductions go directly from rank to rank.

    scratch: memory for the slices that arrive from other ranks before they are added up. The first
    arrives in the memory of the sum, where that is of its dtype and no part of the buffer.
    """

    transport = "point_to_point"
    takes_scratch = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        role: str,
        events: EventBus,
        streams: Streams,
        scratch: Scratch,
    ) -> None:
        super().__init__(group, role, events, streams)
        self._scratch = scratch
        self._has_tags = carries_tags(group)
        self._channel = next(_channels.setdefault(group, itertools.count())) % _CHANNELS
        self._gathers, self._reductions = itertools.count(), itertools.count()

    def rendezvous(self, bucket: str) -> None:
        """Do nothing where messages for different buckets never meet."""
        if not self._has_tags:
            super().rendezvous(bucket)

    def all_gather(self, full: torch.Tensor, own: torch.Tensor, bucket: str) -> Pending:
        """Fill `full` with every rank's `own`."""
        if self.size == 1:
            return super().all_gather(full, own, bucket)
        self._publish("all_gather", full, bucket)
        parts = full.tensor_split(self.size)
        name = f"all_gather of {bucket}"
        tag = self._tag(next(self._gathers), bucket)
        exchange = self._exchange(name, [own] * self.size, parts, tag)
        if own.data_ptr() != parts[self.rank].data_ptr():
            parts[self.rank].copy_(own)
        return exchange

    def reduce(
        self,
        full: torch.Tensor,
        own: torch.Tensor | None,
        bucket: str,
        *,
        average: bool,
        total: torch.dtype,
    ) -> Pending:
        """As `Communicator.reduce`; `wait` returns the sum of a slice in `total`.

        What replaces all of `full` is rounded once to its dtype.
        """
        if self.size == 1:
            return super().reduce(full, own, bucket, average=average, total=total)
        self._publish("all_reduce" if own is None else "reduce_scatter", full, bucket)
        parts = full.tensor_split(self.size)
        mine = parts[self.rank]
        received, block, others = [], None, self.size - 1
        if own is not None and own.dtype is total is mine.dtype and not _shares(own, full):
            received, others = [own], others - 1
        if others:
            block = self._scratch(bucket, others * mine.numel(), mine.dtype)
            received += block.data.tensor_split(others)
        contributions = [*received[: self.rank], mine, *received[self.rank :]]
        tag = self._tag(next(self._reductions), bucket) + 1
        exchange = self._exchange(f"reduction of {bucket}", parts, contributions, tag)

        def add_up() -> torch.Tensor:
            exchange.wait()
            found = sum_in_order(contributions, total, own)
            if block is not None:
                block.give()
            return found.div_(self.size) if average else found

        reduction = _Then(add_up)
        if own is not None:
            return reduction
        tag_of_gather = self._tag(next(self._gathers), bucket)

        def gather() -> torch.Tensor:
            mine.copy_(reduction.wait())
            name = f"second half of the all_reduce of {bucket}"
            self._exchange(name, [mine] * self.size, parts, tag_of_gather).wait()
            return full

        return _Then(gather)

    def _exchange(
        self,
        name: str,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        tag: int,
    ) -> InFlight:
        """Send `outgoing[j]` to rank j and receive `incoming[j]` from it, this rank apart."""
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        works: Sequence[Work | None]
        if self._has_tags:
            # Receives first: a message that finds its buffer posted is not staged.
            works = [
                dist.irecv(incoming[peer], group=self._group, group_src=peer, tag=tag)
                for peer in reversed(others)
            ]
            works += [
                dist.isend(outgoing[peer], group=self._group, group_dst=peer, tag=tag)
                for peer in others
            ]
        else:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(function, tensors[peer], group=self._group, tag=tag, group_peer=peer)
                    for function, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
                    for peer in others
                ]
            )
        sent, received = ([side[peer] for peer in others] for side in (outgoing, incoming))
        started = [work for work in works if work is not None]
        return self._streams.track(started, name, *sent, *received)

    def _tag(self, operation: int, bucket: str) -> int:
        if not self._has_tags:
            return 0
        number = _checksum(bucket) * _OPERATIONS + operation % _OPERATIONS
        return _FIRST_TAG + (number * _CHANNELS + self._channel) * 2


def carries_tags(group: dist.ProcessGroup) -> bool:
    """Whether a message is received by whoever asks for its tag."""
    return dist.get_backend(group) == "gloo"


@cache
def _checksum(bucket: str) -> int:
    return zlib.crc32(bucket.encode()) % _BUCKETS


def _shares(part: torch.Tensor, full: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()


class _Then:
    """A result that is computed when it is first waited for."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute = compute
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The result."""
        if self._result is None:
            self._result = self._compute()
        return self._result


def sum_in_order(
    contributions: Sequence[torch.Tensor], dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """c0 + c1 + ... from left to right, each sum in `dtype`.

    In `out` where that has the dtype of the sum and holds nothing that is added later than second;
    else in memory of its own.
    """
    first, *rest = contributions
    total = out
    later = [contribution.data_ptr() for contribution in contributions[2:]]
    if total is None or total.dtype != dtype or total.data_ptr() in later:
        total = first.new_empty(first.shape, dtype=dtype)
    if rest and first.dtype == dtype:
        torch.add(first, rest[0], out=total)
        rest = rest[1:]
    else:
        total.copy_(first)
    for contribution in rest:
        total.add_(contribution)
    return total
