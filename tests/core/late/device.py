"""A device whose work is late, in CPU memory: streams, events and memory as CUDA's, in slow motion.

Nothing runs when it is enqueued. Every stream is a queue, and only a host that reads memory makes
anything run: then streams take turns in an order drawn from a seed, each entry once the events it
waits for have come. Until an operation has run, what it makes holds NaN; once its owner has dropped
or freed it, it will, as soon as the stream that it was allocated on gets there. What was dropped is
the next allocation of its size there. What is read too early, written too late or given back too
soon therefore changes numbers.
"""

from __future__ import annotations

import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

#: What an entry starts that ends later.
Started = Future[Any] | None
_POISON = 0xFF  # NaN in every floating-point dtype
_PATIENCE_SECONDS = 2e-3
_LIMIT_SECONDS = 60.0
_ENDED = "operation not permitted on an event last recorded in a capturing stream"


class StreamError(RuntimeError):
    """What CUDA would refuse, or hang at."""


@dataclass(frozen=True)
class Event:
    """The first `count` entries of a stream have ended. capture: during which it was recorded."""

    stream: Stream
    count: int
    capture: object = None

    @property
    def has_come(self) -> bool:
        return self.stream.ended >= self.count


@dataclass(frozen=True)
class Entry:
    """after: what it waits for. touches: addresses of the memory that it reads or writes."""

    run: Callable[[], Started]
    after: tuple[Event, ...]
    touches: frozenset[int] = frozenset()


@dataclass(eq=False)
class Stream:
    """weight: how readily it runs. waits: of its next entry, the last event of every stream.

    flying: started, with its work. capture: that it takes part in, if any.
    """

    name: str
    weight: float
    queue: deque[Entry] = field(default_factory=deque)
    waits: dict[Stream, Event] = field(default_factory=dict)
    flying: tuple[Entry, Future[Any]] | None = None
    ended: int = 0
    capture: object = None

    def pending(self) -> list[Entry]:
        """What has not ended."""
        return [*([self.flying[0]] if self.flying else []), *self.queue]

    def last(self) -> Event:
        """Every entry so far."""
        return Event(self, self.ended + len(self.pending()), self.capture)

    def record(self) -> list[Event]:
        """Everything so far: what it has been told to wait for as well."""
        return [self.last(), *self.waits.values()]

    def wait_for(self, events: Iterable[Event]) -> None:
        """What is enqueued from now on comes behind them, and is captured if they are.

        Raises:
            StreamError: the stream is captured and they are not, or their capture has ended.
        """
        for event in events:
            if event.capture is not self.capture:
                self._join(event.capture)
            known = self.waits.get(event.stream)
            if known is None or known.count < event.count:
                self.waits[event.stream] = event

    def _join(self, capture: object) -> None:
        if self.capture is not None:
            raise StreamError("dependency created on uncaptured work in another stream")
        if LateDevice.now is None or capture is not LateDevice.now.capture:
            raise StreamError(_ENDED)
        self.capture = capture
        self.waits.clear()

    def record_event(self) -> RecordedEvent:
        """What can be waited for by another stream."""
        return RecordedEvent(self.record())

    def wait_stream(self, other: Stream) -> None:
        """What is enqueued from now on comes behind everything that `other` has."""
        self.wait_for(other.record())

    @property
    def can_start(self) -> bool:
        is_free = bool(self.queue) and self.flying is None
        return is_free and all(event.has_come for event in self.queue[0].after)

    def start(self) -> None:
        entry = self.queue.popleft()
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            work = entry.run()
        if work is None:
            self.ended += 1
        else:
            self.flying = entry, work

    def land(self) -> None:
        """Note what has ended."""
        if self.flying and self.flying[1].done():
            self.flying[1].result()
            self.flying = None
            self.ended += 1


@dataclass(frozen=True)
class RecordedEvent:
    """`torch.cuda.Event`, once it is recorded."""

    events: list[Event]

    def wait(self, stream: Stream) -> None:
        """Let a stream wait for it."""
        stream.wait_for(self.events)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        assert LateDevice.now is not None
        for event in self.events:
            LateDevice.now._run_until(event)


@dataclass(eq=False)
class Block:
    """Memory that outlives its owner. stream: that it came from. capture: during which it did."""

    memory: np.ndarray[Any, Any]
    bytes: Tensor
    stream: Stream
    capture: object


class LateDevice:
    """Its streams by name. The same seed draws the same order."""

    #: The one that is in use, if any.
    now: ClassVar[LateDevice | None] = None

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._streams: dict[str, Stream] = {}
        self._blocks: dict[int, Block] = {}
        self._dropped: list[Block] = []
        self._of_host: dict[int, Tensor] = {}
        self.capture: object = None
        self.compute = self.current = self.stream("compute")
        self.ran = 0

    def stream(self, name: str) -> Stream:
        """The stream of that name; some are much slower than others."""
        if name not in self._streams:
            weight = 10 ** random.Random(f"{self._seed} {name}").uniform(-1.5, 1.5)
            self._streams[name] = Stream(name, weight)
        return self._streams[name]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Enqueue there inside the block."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def enqueue(
        self,
        run: Callable[[], Started],
        stream: Stream | None = None,
        *,
        touches: Iterable[Tensor] = (),
    ) -> None:
        """Behind everything that is on the stream, and what it waits for."""
        stream = stream or self.current
        after, stream.waits = tuple(stream.waits.values()), {}
        stream.queue.append(Entry(run, after, _addresses(touches)))

    def unordered(self, memory: Iterable[Tensor]) -> list[str]:
        """Streams that still have to touch this memory, and that the current one does not await."""
        addresses, joined = _addresses(memory), _joined(self.current)
        return [
            stream.name
            for stream in self._streams.values()
            for number, entry in enumerate(stream.pending())
            if number >= joined.get(stream, 0) and not addresses.isdisjoint(entry.touches)
        ]

    def synchronize(self, *streams: Stream) -> None:
        """Return once these streams have done what they have, or all of them.

        Raises:
            StreamError: something waits for what nobody will do, or a capture is under way.
        """
        if self.capture is not None:
            raise StreamError("operation not permitted when stream is capturing")
        for stream in streams or tuple(self._streams.values()):
            for event in stream.record():
                self._run_until(event)

    def _run_until(self, event: Event) -> None:
        end = time.monotonic() + _LIMIT_SECONDS
        while not event.has_come:
            ready = [one for one in self._streams.values() if one.can_start]
            flying = [one for one in self._streams.values() if one.flying]
            if not (ready or flying) or time.monotonic() > end:
                raise StreamError(f"{event.stream.name} waits for what nobody does")
            either = [*ready, *flying]
            (chosen,) = self._random.choices(either, [one.weight for one in either])
            if chosen.can_start:
                chosen.start()
                self.ran += 1
            else:
                works = [one.flying[1] for one in flying if one.flying]
                wait(works, _PATIENCE_SECONDS, FIRST_COMPLETED)
                for one in flying:
                    one.land()

    # -- memory ------------------------------------------------------------------------------

    def allocate(self, like: Tensor) -> Tensor:
        """A tensor of the shape, strides and dtype of `like`, which holds poison."""
        size_bytes = like.untyped_storage().nbytes()
        if not size_bytes:
            return like
        block = self._dropped_block(size_bytes) if like.is_floating_point() else None
        if block is None:
            value = _POISON if like.is_floating_point() else 0
            memory = np.full(size_bytes, value, dtype=np.uint8)
            block = Block(memory, torch.from_numpy(memory), self.current, self.capture)
        owned = block.memory.view()
        end = weakref.finalize(owned, self._drop, block)
        end.atexit = False
        self._blocks[block.bytes.data_ptr()] = block
        return _over(torch.from_numpy(owned), like)

    def _dropped_block(self, size_bytes: int) -> Block | None:
        """The last one of this size from the current stream, and from the capture under way."""
        wanted = size_bytes, self.current, self.capture
        for number, block in reversed([*enumerate(self._dropped)]):
            if (block.memory.nbytes, block.stream, block.capture) == wanted:
                return self._dropped.pop(number)
        return None

    def has(self, tensor: Tensor) -> bool:
        """Whether its memory is the device's."""
        return tensor.untyped_storage().data_ptr() in self._blocks

    def hosted(self, tensor: Tensor) -> Tensor:
        """The same tensor, whose memory the host computes in, as long as the device lives."""
        self._of_host[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_of_host(self, tensor: Tensor) -> bool:
        """Whether the host computes in its memory."""
        return tensor.untyped_storage().data_ptr() in self._of_host

    def beneath(self, tensor: Tensor) -> Tensor:
        """The same memory, whatever becomes of the tensor."""
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        return _over(tensor if block is None else block.bytes, tensor)

    def resize(self, address: int, size_bytes: int) -> bool:
        """Free a storage, or give it other memory; False where it is none of the device's."""
        block = self._blocks.get(address)
        if block is None:
            return False
        if size_bytes > block.bytes.nbytes:
            raise StreamError(f"resize to {size_bytes} of {block.bytes.nbytes} bytes")
        if size_bytes:
            block.stream = self.current
        else:
            self._spoil(block)
        return True

    def _drop(self, block: Block) -> None:
        del self._blocks[block.bytes.data_ptr()]
        self._spoil(block)
        self._dropped.append(block)

    def _spoil(self, block: Block) -> None:
        """From here on the stream that it was allocated on may use it for something else."""
        if LateDevice.now is not self or block.capture is not self.capture:
            return  # a graph keeps its memory, and none that was there before

        def spoil() -> None:
            block.bytes.fill_(_POISON)

        self.enqueue(spoil, block.stream)

    # -- graphs ------------------------------------------------------------------------------

    @contextmanager
    def capturing(self, graph: LateGraph, stream: Stream) -> Iterator[None]:
        """What is enqueued inside the block belongs to `graph`, and does not run."""
        self.synchronize()
        self.capture = stream.capture = graph
        for one in self._streams.values():
            one.waits.clear()
        try:
            with self.on(stream):
                yield
            _refuse_unjoined(stream, self._streams.values())
            for one in self._streams.values():
                graph.entries += [(one, entry) for entry in one.queue]
        finally:
            self.capture = None
            for one in self._streams.values():
                one.capture = None
                one.queue.clear()
                one.waits.clear()
        graph.begin = {one: one.ended for one in self._streams.values()}

    def launch(self, graph: LateGraph) -> None:
        """Enqueue it behind everything on the current stream, which waits for all of it."""
        before = self.current.record()
        shift: dict[Stream, int] = {}
        for stream, _ in graph.entries:
            if stream not in shift:
                shift[stream] = stream.last().count - graph.begin[stream]
                stream.wait_for(before)
        for stream, entry in graph.entries:
            inside = [e for e in entry.after if e.count > graph.begin.get(e.stream, e.count)]
            stream.wait_for(Event(e.stream, e.count + shift[e.stream]) for e in inside)
            self.enqueue(entry.run, stream)
        for stream in shift:
            self.current.wait_stream(stream)


class LateGraph:
    """`torch.cuda.CUDAGraph`. begin: how many entries the streams had ended at its capture."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.entries: list[tuple[Stream, Entry]] = []
        self.begin: dict[Stream, int] = {}

    def replay(self) -> None:
        self._device.launch(self)


def _refuse_unjoined(stream: Stream, streams: Iterable[Stream]) -> None:
    """A capture ends on the stream that it began on, which has waited for all others."""
    joined = _joined(stream)
    for other in streams:
        if joined.get(other, 0) < len(other.queue):
            raise StreamError(f"capturing stream has unjoined work on {other.name}")


def _joined(stream: Stream) -> dict[Stream, int]:
    """What comes before the next entry of a stream: the first so many pending ones of others."""
    joined: dict[Stream, int] = {}
    found = stream.record()
    while found:
        event = found.pop()
        first, end = joined.get(event.stream, 0), event.count - event.stream.ended
        for entry in event.stream.pending()[first : max(first, end)]:
            found += entry.after
        joined[event.stream] = max(first, end)
    return joined


def _addresses(memory: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(one.untyped_storage().data_ptr() for one in memory)


def _over(memory: Tensor, like: Tensor) -> Tensor:
    """A tensor over the storage of `memory`, as `like` lies in its own."""
    bare = torch.empty(0, dtype=like.dtype)
    return bare.set_(memory.untyped_storage(), like.storage_offset(), like.size(), like.stride())
