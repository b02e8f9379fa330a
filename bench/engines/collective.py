"""Engine `collective`: one operation by itself, on buffers and transports as the core uses them.

    operand (own slice, or all of it) --operation--> result

A gather and a reduce-scatter have an operand and a result of their own, an all-reduce and a
broadcast work in place: what nccl-tests call out of place and in place. All of it lies in memory of
torch's allocator (`plain`), or in a pool of NCCL's that is registered before the first operation.

[Note: exact values] Every element is a small whole number that depends on its index and its rank,
and sums stay below what the narrowest dtype counts exactly (256 in BF16). So the result is known to
the last bit, whatever the order of the sum, and a slice from a wrong rank or at a wrong place is
detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from bench.engines.dtypes import TORCH_DTYPES
from bench.engines.protocol import TimedCollective
from bench.errors import BenchError, UnsupportedError
from bench.spec import CollectiveSettings, ResolvedRun
from mfsdp_core.comm.point_to_point import PointToPointCommunicator
from mfsdp_core.comm.protocol import Pending, PendingSum
from mfsdp_core.comm.symmetric import UserBuffers, user_buffers
from mfsdp_core.comm.torch_backend import Communicator
from mfsdp_core.events import EventBus
from mfsdp_core.streams import Streams

#: Whole numbers up to this one are exact in BF16.
_EXACT: Final = 256
_LEVELS: Final = 7
_PATTERN: Final = 13
#: Compared at a time, so that a check takes little memory besides buffers of any size.
CHECKED_ELEMENTS = 1 << 24
_BUCKET: Final = "buffer"


class WrongValuesError(BenchError):
    """A collective gave a wrong result."""


class ExactValues:
    """The values that each of `ranks` ranks contributes; see [Note: exact values]."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        self._sparse = -(-ranks // _EXACT)
        self._levels = max(1, min(_LEVELS, _EXACT * self._sparse // ranks))
        # Values repeat with the index, so a sum over thousands of ranks is looked up.
        period = torch.arange(_PATTERN * self._sparse, device=device)
        self._sums = torch.stack([self.of(period, rank) for rank in range(ranks)]).sum(0)

    def of(self, index: Tensor, rank: Tensor | int) -> Tensor:
        """The contribution of `rank`."""
        values = (index + 3 * rank) * 5 % _PATTERN % (self._levels + 1)
        return torch.where((index + rank) % self._sparse == 0, values, 0).float()

    def summed(self, index: Tensor) -> Tensor:
        """The sum over all ranks."""
        return self._sums[index % self._sums.numel()]


class _KeptScratch:
    """Memory for slices that arrive, allocated once: every operation needs the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[tuple[int, torch.dtype], Tensor] = {}

    def acquire(self, bucket: str, elements: int, dtype: torch.dtype) -> Tensor:
        del bucket
        key = (elements, dtype)
        if key not in self._kept:
            self._kept[key] = torch.empty(elements, dtype=dtype, device=self._device)
        return self._kept[key]

    def release(self, bucket: str, memory: Tensor) -> None:
        del bucket, memory


class CollectiveEngine(TimedCollective):
    """One rank's part of the operation. Its methods are collective."""

    def __init__(
        self, resolved: ResolvedRun, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        settings = resolved.engine.settings
        if not isinstance(settings, CollectiveSettings):
            raise TypeError(f"expected the settings of a collective, found {settings!r:.80}")
        self._settings = settings
        self._device = device
        self._dtype = TORCH_DTYPES[resolved.dtypes.compute]
        self._streams = Streams.of(device)
        self._registered: UserBuffers | None = None
        if settings.registration != "plain":
            self._registered = user_buffers(
                [("world", group)],
                self._streams,
                symmetric=settings.registration == "symmetric",
            )
        self._communicator = _communicator(settings, group, self._streams)
        self._values = ExactValues(self._communicator.size, device)
        elements = settings.size_bytes // self._dtype.itemsize
        is_cut = settings.operation in ("all_gather", "reduce_scatter")
        with self._streams.communicated() if self._registered else nullcontext():
            self._full = torch.zeros(elements, dtype=self._dtype, device=device)
            self._own = self._full
            if is_cut:
                self._own = torch.zeros(
                    elements // self._communicator.size, dtype=self._dtype, device=device
                )
        if self._registered is not None:
            self._registered.register()

    def start(self) -> Pending | PendingSum:
        """Issue the operation once; its `wait` orders the current stream behind it."""
        one, operation = self._communicator, self._settings.operation
        if operation == "all_gather":
            return one.all_gather(self._full, self._own, _BUCKET)
        if operation == "reduce_scatter":
            return one.reduce_scatter(
                self._own, self._full, _BUCKET, average=False, total=self._dtype
            )
        if operation == "all_reduce":
            return one.all_reduce(self._full, _BUCKET, average=False, total=self._dtype)
        return one.broadcast(self._full, _BUCKET)

    def enqueue(self, operations: int) -> None:
        """Issue that many, one behind the other; the current stream is behind all of them.

        On their group's stream nothing comes between them: no stream waits for another before the
        last has ended. A transport that adds up by itself does that on the current stream.
        """
        if self._settings.transport != "native":
            for _ in range(operations):
                self.start().wait()
            return
        for pending in [self.start() for _ in range(operations)]:
            pending.wait()

    def synchronize(self) -> None:
        """Return once the device has done everything."""
        self._streams.synchronize()

    def check(self) -> None:
        """Run the operation once on values whose result is known.

        Leaves zeros, so that any number of operations can follow.

        Raises:
            WrongValuesError: an element is wrong; names the first one.
        """
        rank, operation = self._communicator.rank, self._settings.operation
        is_gather = operation == "all_gather"
        operand = self._own if is_gather else self._full
        first = rank * self._own.numel() if is_gather else 0
        for part, index in self._parts(operand, first):
            part.copy_(self._values.of(index, rank))
        found = self.start().wait()
        if not isinstance(found, Tensor):
            found = self._full
        first = rank * self._own.numel() if operation == "reduce_scatter" else 0
        self._compare(found, first)
        for buffer in (self._full, self._own):
            buffer.zero_()
        self.synchronize()

    def memory_by_category(self) -> dict[str, int]:
        """Operand and result, without the memory of a transport."""
        buffers = {tensor.data_ptr(): tensor.nbytes for tensor in (self._full, self._own)}
        return {"communication_buffers": sum(buffers.values())}

    def buffer_registration(self) -> dict[str, Any] | None:
        """What NCCL has registered, and why not more; None where nothing was asked for."""
        return None if self._registered is None else self._registered.report()

    def transports(self) -> dict[str, str]:
        """What carries the bytes."""
        return {"world": self._communicator.transport}

    def code_path(self) -> str:
        """The file that calls the transports."""
        return __file__

    def close(self) -> None:
        """Deregister, before the process group goes."""
        if self._registered is not None:
            self._registered.close()

    def _compare(self, found: Tensor, first: int) -> None:
        wrong, complaint = 0, ""
        for part, index in self._parts(found, first):
            wanted = self._wanted(index).to(part.dtype)
            apart = torch.nonzero(part != wanted).flatten()
            if apart.numel() and not wrong:
                at = int(apart[0])
                complaint = (
                    f"expected {wanted[at].item():g} in element {int(index[at])} and found"
                    f" {part[at].item():g}"
                )
            wrong += apart.numel()
        if wrong:
            settings, one = self._settings, self._communicator
            raise WrongValuesError(
                f"{settings.operation} of {settings.size_bytes} bytes by {one.transport},"
                f" {settings.registration} memory: rank {one.rank} {complaint}; {wrong} of"
                f" {found.numel()} elements are wrong"
            )

    def _parts(self, buffer: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of a buffer with the indices of their elements, which take eight bytes each."""
        for part in buffer.split(CHECKED_ELEMENTS):
            yield part, torch.arange(first, first + part.numel(), device=self._device)
            first += part.numel()

    def _wanted(self, index: Tensor) -> Tensor:
        """The right elements of the result."""
        operation = self._settings.operation
        if operation == "broadcast":
            return self._values.of(index, 0)
        if operation == "all_gather":
            return self._values.of(index, index // self._own.numel())
        return self._values.summed(index)


def _communicator(
    settings: CollectiveSettings, group: dist.ProcessGroup, streams: Streams
) -> Communicator:
    if settings.transport == "native":
        return Communicator(group, "world", EventBus(), streams)
    if settings.transport != "point_to_point":
        raise UnsupportedError("transport-is-gone", f"{settings.transport} is gone: plan anew")
    scratch = _KeptScratch(streams.device)
    return PointToPointCommunicator(group, "world", EventBus(), streams, scratch)


def build(resolved: ResolvedRun, device: torch.device) -> CollectiveEngine:
    """Factory of `bench.engines.registry`."""
    group: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
    return CollectiveEngine(resolved, device, group)
