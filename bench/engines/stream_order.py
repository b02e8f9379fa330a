"""Is everything that touches the same memory ordered? A happens-before checker.

Vector clocks: each stream counts its own operations and knows how far it has waited for others. Two
operations that overlap in memory, one of them a write, must be ordered: the later one's stream has
waited for the earlier one. Nothing is delayed and no race has to happen for it to be found, so a
CPU shows the races of a GPU.

Operations are those of torch's dispatcher, on the current stream or on that of copy-ins, and the
collectives that `mfsdp_core.streams` tracks, each on the stream of its group. Giving memory back
counts as a write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mfsdp_core.observer import COPY_IN, CURRENT, Observer, Span, Tensors, span_of
from mfsdp_core.streams import CopyIn, Streams


@contextmanager
def recorded_order(streams: Streams) -> Iterator[StreamOrder]:
    """Record what happens on this thread and in its backward passes, and check its order.

    On a device without streams as if it had those that CUDA has.
    """
    order, before = StreamOrder(), streams.copy_in
    streams.copy_in = before or CopyIn(streams)
    try:
        with streams.observed(order), Operations(order):
            yield order
    finally:
        streams.copy_in = before


@dataclass(frozen=True, slots=True)
class Access:
    """One access of an operation to memory. time: its number on the stream."""

    stream: str
    time: int
    span: Span
    writes: bool
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({'writes' if self.writes else 'reads'}, on {self.stream})"


@dataclass(frozen=True)
class Race:
    """Two accesses to the same memory that nothing orders."""

    first: Access
    second: Access

    def __str__(self) -> str:
        return f"{self.second} does not wait for {self.first}"


@dataclass
class StreamOrder(Observer):
    """Clocks, accesses, and the races that were found."""

    races: list[Race] = field(default_factory=list)
    operations: int = 0
    _clocks: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    _accesses: dict[str, list[Access]] = field(default_factory=lambda: defaultdict(list))
    _open: dict[int, tuple[str, dict[str, int]]] = field(default_factory=dict)
    _groups: dict[int, str] = field(default_factory=dict)
    _numbers: int = 0
    _current: str = CURRENT

    @property
    def unwaited(self) -> list[str]:
        """Collectives, and copy-ins, that nobody has waited for."""
        return [name for name, _ in self._open.values()]

    def run(
        self, name: str, reads: Iterable[Span], writes: Iterable[Span], stream: str | None = None
    ) -> None:
        """An operation on `stream`, the current one if None, behind everything enqueued there."""
        if self.is_in_backend:
            return
        self.operations += 1
        stream = stream or self._current
        clock = self._clocks[stream]
        clock[stream] = time = clock.get(stream, 0) + 1
        for spans, is_write in ((reads, False), (writes, True)):
            for span in spans:
                if span.end > span.start:
                    self._access(Access(stream, time, span, is_write, name), clock)

    def issue(self, name: str, stream: str, reads: Iterable[Span], writes: Iterable[Span]) -> int:
        """A collective on `stream`, behind what the current stream has; its number."""
        _join(self._clocks[stream], self._clocks[self._current])
        self.run(name, reads, writes, stream)
        return self._mark(name, stream)

    def issued(self, name: str, group: object, reads: Tensors, writes: Tensors) -> int:
        """As `issue`, of tensors."""
        stream = self._groups.setdefault(id(group), f"group {len(self._groups)}")
        return self.issue(name, stream, map(span_of, reads), map(span_of, writes))

    def recorded(self, name: str) -> int:
        """All that the current stream has; its number."""
        return self._mark(name, self._current)

    def waited(self, number: int) -> None:
        """The current stream waits for what has this number."""
        super().waited(number)
        name_and_clock = self._open.pop(number, None)
        if name_and_clock is not None:
            _join(self._clocks[self._current], name_and_clock[1])

    def switched(self, stream: str) -> None:
        """Another stream is current."""
        self._current = stream

    def followed(self) -> None:
        """The copy-in stream comes behind the current one."""
        _join(self._clocks[COPY_IN], self._clocks[self._current])

    def made(self, memory: Iterable[Tensor]) -> None:
        """New memory, of the current stream: what another stream has had is never among it.

        A CPU, which has no streams, hands it out all the same.
        """
        other = COPY_IN if self._current == CURRENT else CURRENT
        if not self._accesses[other]:
            return
        for span in map(span_of, memory):
            kept = [one for one in self._accesses[other] if not _overlap(one.span, span)]
            self._accesses[other] = kept

    def resized(self, memory: Tensor, *, stays: bool) -> None:
        """New memory."""
        del stays
        self.made((memory,))

    def released(self, memory: Tensor, name: object) -> None:
        """Memory goes back."""
        self.run(f"release of {name}", (), (span_of(memory),))

    def _mark(self, name: str, stream: str) -> int:
        self._numbers += 1
        self._open[self._numbers] = (name, dict(self._clocks[stream]))
        return self._numbers

    def _access(self, access: Access, clock: dict[str, int]) -> None:
        for stream, earlier in self._accesses.items():
            if stream == access.stream:
                continue
            known = clock.get(stream, 0)
            for other in reversed(earlier):
                if other.time <= known:
                    break
                if (other.writes or access.writes) and _overlap(other.span, access.span):
                    self.races.append(Race(other, access))
        self._accesses[access.stream].append(access)


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def _overlap(a: Span, b: Span) -> bool:
    return a.start < b.end and b.start < a.end


class Operations(TorchDispatchMode):
    """Reports to a `StreamOrder` what every operation reads and writes."""

    def __init__(self, order: StreamOrder) -> None:
        super().__init__()
        self._order = order

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, and note it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as operations on what this rank holds
        result = func(*args, **(kwargs or {}))
        # Collectives are tracked where they are issued: here it is not known when they end.
        if not func._schema.name.startswith(("c10d::", "_c10d_functional::")):
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        schema = func._schema
        aliases = [one.alias_info for one in schema.returns if one.alias_info is not None]
        is_constant = schema.name == "aten::lift_fresh"  # numbers of Python, new as a tensor
        if is_constant or not aliases:
            self._order.made(_tensors(result))
        if not all(alias.is_write for alias in aliases):
            return  # a view
        reads: list[Span] = []
        writes: list[Span] = []
        for index, argument in enumerate(schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(map(span_of, _tensors(value)))
        writes.extend(map(span_of, _tensors(result)))
        self._order.run(schema.name, reads, writes)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [one for one in value if isinstance(one, Tensor)]
    return []
