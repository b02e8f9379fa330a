"""The device as the core uses it: its memory, its streams, and what is under way on them.

One object per model; the only module that calls `torch.cuda`. On a CPU it does nothing.

[Note: stream order] The core enqueues everything that it computes on the stream that is current
when it is called (copies into buckets, casts, landings), and has no stream of its own. A collective
runs on a stream of its group, from what was enqueued before it was issued until somebody waits:

1. What a collective reads is not written, and what it writes is neither read nor written, between
   its issue and the wait for it.
2. Memory is given back, to the allocator or to a pool, after the wait for what uses it.
3. Every collective is waited for, and its tensors are referenced until then.

A landing is therefore deferred to where its result is needed, instead of running on a side stream:
the wait orders it, and memory never crosses from one stream's allocator to another's.
`stream_order` checks the rules on operations as they were recorded, on any device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from mfsdp_core.stream_order import StreamOrder


Tensors = Sequence[torch.Tensor]


class Work(Protocol):
    """A collective as torch hands it over."""

    def wait(self) -> object:
        """Let the current stream wait for its end."""


class Observer(Protocol):
    """Somebody who writes down what happens on streams. Numbers are of collectives."""

    def issued(
        self,
        name: str,
        group: object,
        reads: Tensors,
        writes: Tensors,
    ) -> int:
        """A collective starts; its number."""

    def waited(self, number: int) -> None:
        """The current stream waits for it."""

    def released(self, memory: torch.Tensor, name: object) -> None:
        """Memory may be used again, by anybody, from here on."""


class InFlight:
    """Works that make up one collective. Holds its tensors until it was waited for."""

    __slots__ = ("_number", "_observer", "_tensors", "_works")

    def __init__(
        self,
        works: Sequence[Work],
        tensors: Tensors,
        observer: Observer | None,
        number: int,
    ) -> None:
        self._works = works
        self._tensors = tensors
        self._observer = observer
        self._number = number

    def wait(self) -> None:
        """Let the current stream wait for the end of all of them; on a CPU return afterwards."""
        for work in self._works:
            work.wait()
        self._works = self._tensors = ()
        if self._observer is not None:
            self._observer.waited(self._number)
            self._observer = None


class Streams:
    """Those of a device whose operations end in the order in which they are issued: a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._observer: Observer | None = None

    @staticmethod
    def of(device: torch.device) -> Streams:
        """Those of `device`."""
        return CudaStreams(device) if device.type == "cuda" else Streams(device)

    def track(
        self,
        works: Sequence[Work],
        name: str,
        group: object,
        *,
        reads: Tensors,
        writes: Tensors,
    ) -> InFlight:
        """A collective that was issued just now, on the stream of `group`."""
        observer = self._observer
        number = 0 if observer is None else observer.issued(name, group, reads, writes)
        return InFlight(works, (*reads, *writes), observer, number)

    def released(self, memory: torch.Tensor, name: object) -> None:
        """Note that `memory` goes back to its allocator or pool."""
        if self._observer is not None:
            self._observer.released(memory, name)

    def synchronize(self) -> None:
        """Return once the device has done everything."""

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Tell `observer` what happens inside the block."""
        before, self._observer = self._observer, observer
        try:
            yield
        finally:
            self._observer = before

    @contextmanager
    def recording(self) -> Iterator[StreamOrder]:
        """Record what happens on this thread and in its backward passes, and check its order."""
        from mfsdp_core.stream_order import Operations, StreamOrder

        order = StreamOrder()
        with self.observed(order), Operations(order):
            yield order


class CudaStreams(Streams):
    """Those of a CUDA device."""

    def synchronize(self) -> None:
        """Return once the device has done everything."""
        torch.cuda.synchronize(self.device)


def current_device(kind: str) -> torch.device:
    """The device of type `kind` that this process computes on."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def default_kind() -> str:
    """The type of device that a process computes on unless it says otherwise."""
    return "cuda" if torch.cuda.is_available() else "cpu"
