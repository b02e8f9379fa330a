"""How the gradients of one bucket leave this rank: from a flat buffer, or from many tensors.

[Note: gradients where autograd left them] A transport that takes parts scales while it adds up, and
needs no flat buffer to send from. A bucket whose gradients have come once each, contiguous and in
the dtype of the wire, is then reduced from the tensors that autograd made: no copy, and no memory
besides. Anything else (a second gradient, a kernel that writes by itself, a missing gradient) puts
those that are held where they were to be copied, and goes on as without.
"""

from __future__ import annotations

import torch

from mfsdp_core.comm.parts import Parts
from mfsdp_core.comm.protocol import Communicator, PendingSum
from mfsdp_core.memory.allocators import BucketAllocator, BufferKey, TemporaryAllocator
from mfsdp_core.plan.dtype_policy import GroupDtypes
from mfsdp_core.runtime.bucket import BucketSpec
from mfsdp_core.shard.flat_buffer import FullBuffer


class GradientSender:
    """Starts the reductions of one bucket.

    scale: of gradients that are not multiplied by it yet. takes_parts: whether gradients may be
    held, the same on all ranks.
    """

    def __init__(
        self,
        communicator: Communicator,
        allocator: BucketAllocator,
        spec: BucketSpec,
        scale: float,
        *,
        average: bool,
    ) -> None:
        self._communicator = communicator
        self._allocator = allocator
        self._layout = spec.layout
        self._offsets = tuple(slot.offset for slot in spec.layout.slots)
        self._name = spec.name
        self._scale = scale
        self._average = average
        self._key: BufferKey | None = None
        self._total = spec.dtypes.reduce
        self.takes_parts = False
        self._held: dict[int, torch.Tensor] = {}

    def admit_parts(
        self,
        dtypes: GroupDtypes[torch.dtype],
        result: torch.dtype,
        *,
        key: BufferKey | None,
        wanted: bool,
    ) -> None:
        """Decide whether gradients may be held. Pools have memory for them already.

        key: what is held is booked as this buffer, which it takes the place of; None: not at all.
        """
        communicator = self._communicator
        self._key, self._total = key, dtypes.reduce
        self.takes_parts = (
            wanted
            and communicator.takes_parts
            and communicator.size > 1
            and isinstance(self._allocator, TemporaryAllocator)
            and communicator.reduces_into(dtypes.reduce, result)
        )

    def hold(self, index: int, gradient: torch.Tensor) -> None:
        """Keep a gradient until its reduction, or until it is taken back."""
        if not self._held and self._key is not None:
            assert isinstance(self._allocator, TemporaryAllocator)
            self._allocator.adopt(self._key, gradient)
        self._held[index] = gradient

    def take_back(self) -> dict[int, torch.Tensor]:
        """What is held, which is not any more."""
        held, self._held = self._held, {}
        if held and self._key is not None:
            self._allocator.release(self._key)
        return held

    @property
    def holds(self) -> bool:
        """Whether a gradient is held."""
        return bool(self._held)

    def destination(self, own: torch.Tensor, reduced: torch.Tensor) -> torch.Tensor:
        """Where a reduction that replaces the gradient may put its result.

        That is where it belongs, which saves a copy of it, unless the transport cannot.
        """
        fits = self._communicator.reduces_into(self._total, reduced.dtype)
        return reduced if fits else own

    @property
    def holds_all(self) -> bool:
        """Whether every gradient is held."""
        return len(self._held) == len(self._offsets)

    def reduce_scatter(self, into: torch.Tensor, buffer: FullBuffer) -> PendingSum:
        """Of a buffer that is scaled."""
        if self.takes_parts:
            return self._reduce_parts(self._views(buffer), into)
        return self._communicator.reduce_scatter(
            into, buffer.data, self._name, average=self._average, total=self._total
        )

    def all_reduce(self, buffer: FullBuffer) -> PendingSum:
        """Of a buffer that is scaled, in place."""
        if self.takes_parts:
            return self._all_reduce_parts(self._views(buffer), buffer.data)
        return self._communicator.all_reduce(
            buffer.data, self._name, average=self._average, total=self._total
        )

    def reduce_held(self, into: torch.Tensor) -> PendingSum:
        """Of the gradients that are held, all of them; into a slice."""
        return self._reduce_parts(self._take_held(), into)

    def all_reduce_held(self, full: torch.Tensor) -> PendingSum:
        """The same into a whole buffer."""
        return self._all_reduce_parts(self._take_held(), full)

    def _take_held(self) -> Parts:
        gradients = tuple(self._held[index] for index in range(len(self._offsets)))
        self._held.clear()
        return self._parts(gradients, is_scaled=self._scale == 1.0)

    def _views(self, buffer: FullBuffer) -> Parts:
        """In the form that other ranks expect, who may send theirs from elsewhere."""
        views = tuple(buffer.tensor(index) for index in range(len(self._offsets)))
        return self._parts(views, is_scaled=True)

    def _parts(self, tensors: tuple[torch.Tensor, ...], *, is_scaled: bool) -> Parts:
        elements = self._layout.total_elements
        return Parts(tensors, self._offsets, elements, self._scale, is_scaled)

    def _reduce_parts(self, parts: Parts, into: torch.Tensor) -> PendingSum:
        return self._communicator.reduce_parts(
            parts, into, self._name, average=self._average, total=self._total
        )

    def _all_reduce_parts(self, parts: Parts, full: torch.Tensor) -> PendingSum:
        return self._communicator.all_reduce_parts(
            parts, full, self._name, average=self._average, total=self._total
        )
