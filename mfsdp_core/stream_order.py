"""Does everything that touches the same memory have an order? A happens-before checker.

Vector clocks: each stream counts its own operations and knows how far it has waited for others. Two
operations that overlap in memory, one of them a write, must be ordered: the later one's stream has
waited for the earlier one. Nothing is delayed and no race has to happen for it to be found, so a
CPU shows the races of a GPU.

Operations are those of torch's dispatcher, on the stream `compute`, and the collectives that
`streams.Streams` tracks, each on the stream of its group. Giving memory back counts as a write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

COMPUTE = "compute"


class Span(NamedTuple):
    """Addresses from `start` to before `end`, in bytes."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Access:
    """What an operation did to memory: which stream, and its how manieth operation."""

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
class StreamOrder:
    """Clocks, accesses and what was wrong. An `Observer` of `streams`."""

    races: list[Race] = field(default_factory=list)
    operations: int = 0
    _clocks: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    _accesses: dict[str, list[Access]] = field(default_factory=lambda: defaultdict(list))
    _open: dict[int, tuple[str, dict[str, int]]] = field(default_factory=dict)
    _groups: dict[int, str] = field(default_factory=dict)
    _collectives: int = 0

    @property
    def unwaited(self) -> list[str]:
        """Collectives that nobody has waited for."""
        return [name for name, _ in self._open.values()]

    def run(
        self, name: str, reads: Iterable[Span], writes: Iterable[Span], stream: str = COMPUTE
    ) -> None:
        """An operation on `stream`, behind everything that was enqueued there before."""
        self.operations += 1
        clock = self._clocks[stream]
        clock[stream] = time = clock.get(stream, 0) + 1
        for spans, is_write in ((reads, False), (writes, True)):
            for span in spans:
                if span.end > span.start:
                    self._access(Access(stream, time, span, is_write, name), clock)

    def issue(self, name: str, stream: str, reads: Iterable[Span], writes: Iterable[Span]) -> int:
        """A collective on `stream`, behind what the stream `compute` has enqueued; its number."""
        clock = self._clocks[stream]
        _join(clock, self._clocks[COMPUTE])
        self.run(name, reads, writes, stream)
        self._collectives += 1
        self._open[self._collectives] = (name, dict(clock))
        return self._collectives

    def issued(
        self, name: str, group: object, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> int:
        """As `issue`, of tensors."""
        stream = self._groups.setdefault(id(group), f"group {len(self._groups)}")
        return self.issue(name, stream, map(span_of, reads), map(span_of, writes))

    def waiting(self, number: int) -> None:
        """The stream `compute` is about to wait for collective `number`."""

    def waited(self, number: int) -> None:
        """The stream `compute` waits for collective `number`."""
        name_and_clock = self._open.pop(number, None)
        if name_and_clock is not None:
            _join(self._clocks[COMPUTE], name_and_clock[1])

    def resized(self, memory: Tensor) -> None:
        """New memory: nobody has touched it."""

    def released(self, memory: Tensor, name: object) -> None:
        """Memory goes back."""
        self.run(f"release of {name}", (), (span_of(memory),))

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


def span_of(tensor: Tensor) -> Span:
    """Addresses from the first to the last element; empty where there is no memory."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return Span(0, 0)
    start = tensor.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Span(start, start + (last + 1) * tensor.element_size() if start else 0)


class Operations(TorchDispatchMode):
    """Tells a `StreamOrder` what every operation reads and writes."""

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
