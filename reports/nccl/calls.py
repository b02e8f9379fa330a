"""What was chosen for the calls of each communicator, operation, size and phase.

Every process is walked through in order, so that each call meets the communicators and the
registrations of its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NamedTuple

from reports.nccl.communicators import GroupKey, Range, View, Views, registering_views
from reports.nccl.job import LoggedJob, Process
from reports.nccl.model import (
    ANY,
    SCALED_BY_RANKS,
    Buffers,
    BytesAre,
    Choice,
    CollectiveCall,
    Kind,
    Observation,
    Sightings,
    StateChange,
    Versions,
    call_bytes,
)

Phase = Literal["before", "after", ""]
UNKNOWN_OPERATION: Final = "(operation not printed)"
_MOST_CALLS: Final = 32


class CallGroupKey(NamedTuple):
    """group: key of the communicator; for lines that cannot be attributed, their process.

    size_bytes: per rank (see `Choice`), or in total where `bytes_are` says so. phase: before or
    after the first registration on the communicator; "" where no registration was seen.
    """

    group: GroupKey
    operation: str
    size_bytes: int
    bytes_are: BytesAre
    phase: Phase

    @property
    def attributed(self) -> bool:
        """Whether the communicator is known."""
        return self.group[0] != "unknown"


@dataclass
class CallGroup:
    """What the log shows for one key. Counts are by (process, iterations ended, kind).

    lines: TUNING lines. works: calls that they are for. silent: calls without a line. outside: as
    of `buffer_outside`, each distinct answer once. eliminated: the communicator is the only one
    that can have printed the line. batched: bytes are summed over calls that are not known.
    """

    key: CallGroupKey
    lines: Counter[tuple[str, int, Kind]] = field(default_factory=Counter)
    works: Counter[tuple[str, int, Kind]] = field(default_factory=Counter)
    silent: Counter[tuple[str, int]] = field(default_factory=Counter)
    kernels: Counter[tuple[Kind, str]] = field(default_factory=Counter)
    quotes: dict[Kind, str] = field(default_factory=dict)
    call_quotes: dict[Kind | None, str] = field(default_factory=dict)
    calls: dict[Kind | None, set[CollectiveCall]] = field(default_factory=dict)
    grouped: int = 0
    grouped_quote: str = ""
    outside: list[str] = field(default_factory=list)
    every_rank: bool = False
    eliminated: bool = False
    batched: bool = False


@dataclass
class Calls:
    """All groups of calls, and all views by communicator."""

    job: LoggedJob
    by_key: dict[CallGroupKey, CallGroup] = field(default_factory=dict)
    views: dict[GroupKey, list[View]] = field(default_factory=dict)


def calls_of(job: LoggedJob) -> Calls:
    """Walk through every process in order."""
    found = Calls(job)
    for process in job.processes.values():
        _Walk(found, process).run()
    return found


class _Walk:
    """One process."""

    def __init__(self, found: Calls, process: Process) -> None:
        self._found = found
        self._process = process
        self._views = Views(process.name)
        self._registering = registering_views(process.timeline)
        self._registered = False
        self._iteration = 0
        # Every call prints a COLL line, so a TUNING line whose operation and bytes only one
        # communicator of the process ever called belongs to that one, whichever thread printed it.
        self._callers: dict[tuple[str, int], set[str]] = {}
        for _, call, _ in process.observations():
            if call is not None:
                key = (call.operation, call_bytes(call) or -1)
                self._callers.setdefault(key, set()).add(call.comm)

    def run(self) -> None:
        for item in self._process.timeline.items:
            if not isinstance(item, StateChange):
                for observation, seen in item.items():
                    self._observe(observation, seen)
            elif item.kind == "iteration":
                self._iteration = int(item.values[0] or 0)
            else:
                self._registered |= item.kind == "register"
                self._views.take(item)
        for view in self._views.all:
            self._found.views.setdefault(view.key, []).append(view)

    def _observe(self, observation: Observation, seen: Sightings) -> None:
        choice, call, grouped = observation
        view, eliminated = self._view_of(choice, call)
        if call is not None and (call.elements == 0 or call.ranks <= 1):
            return  # nothing is launched for it
        key = self._key(choice, call, view)
        group = self._found.by_key.setdefault(key, CallGroup(key))
        group.eliminated |= eliminated
        kind = None if choice is None else choice.kind
        if call is not None:
            known = group.calls.setdefault(kind, set())
            if len(known) < _MOST_CALLS:
                known.add(call)
            group.call_quotes.setdefault(kind, seen.call_line)
        if choice is None or kind is None:
            group.silent[self._process.name, self._iteration] += seen.count
            return
        place = (self._process.name, self._iteration, kind)
        group.lines[place] += seen.count
        group.works[place] += seen.count * (choice.works or 1)
        group.kernels[kind, choice.what] += seen.count
        group.quotes.setdefault(kind, seen.line)
        group.every_rank |= choice.printed_by_every_rank
        group.batched |= call is None and (choice.works or 1) > 1
        if kind != "symmetric" and call is not None and view is not None:
            if grouped:
                group.grouped += seen.count
                group.grouped_quote = group.grouped_quote or seen.call_line
            outside = buffer_outside(call, seen, view.ranges, self._process)
            if outside not in group.outside:
                group.outside.append(outside)

    def _view_of(
        self, choice: Choice | None, call: CollectiveCall | None
    ) -> tuple[View | None, bool]:
        """The communicator of an observation, and whether it was found by elimination."""
        if call is not None:
            return self._views.of(call.comm, call.ranks), False
        if choice is None:
            return None, False
        view = None
        if not self._callers:
            view = self._views.only_candidate(every_rank=choice.printed_by_every_rank)
        elif choice.bytes_are == "per_rank":
            pointers = self._callers.get((choice.operation or "", choice.size_bytes), set())
            view = self._views.of(next(iter(pointers))) if len(pointers) == 1 else None
        return view, view is not None

    def _key(
        self, choice: Choice | None, call: CollectiveCall | None, view: View | None
    ) -> CallGroupKey:
        operation = call.operation if call is not None else choice.operation if choice else None
        group: GroupKey = ("unknown", self._process.name) if view is None else view.key
        size_bytes, are = _size(choice, call, view)
        return CallGroupKey(
            group, operation or UNKNOWN_OPERATION, size_bytes, are, self._phase(view)
        )

    def _phase(self, view: View | None) -> Phase:
        registered = self._registered if view is None else bool(view.ranges)
        if registered:
            return "after"
        later = view is None or (view.pointer, view.begins) in self._registering
        return "before" if self._registering and later else ""


def _size(
    choice: Choice | None, call: CollectiveCall | None, view: View | None
) -> tuple[int, BytesAre]:
    size_bytes = None if call is None else call_bytes(call)
    if size_bytes is not None:
        return size_bytes, "per_rank"
    if choice is None:
        return (call.elements if call is not None else 0), "total"
    if choice.bytes_are == "per_rank" or choice.operation is None:
        return choice.size_bytes, choice.bytes_are
    if choice.operation not in SCALED_BY_RANKS:
        return choice.size_bytes, "per_rank"
    ranks = 0 if view is None else view.ranks or 0
    if ranks and choice.size_bytes % ranks == 0:
        return choice.size_bytes // ranks, "per_rank"
    return choice.size_bytes, "total"


def buffer_outside(
    call: CollectiveCall, seen: Sightings, ranges: list[Range], process: Process
) -> str:
    """The address of a buffer that had to be registered and lay outside every registered range.

    Only what holds for all seen buffers of these calls is stated: with more distinct buffers than
    are kept, or with some inside, there is no answer, "".
    """
    if not ranges or seen.more_buffers:
        return ""
    first = ""
    for pair in sorted(seen.buffers):
        outside = [
            pointer.decode("ascii", "replace")
            for pointer, size_bytes in _needed(call, pair, process)
            if not _inside(pointer, size_bytes, ranges)
        ]
        if not outside:
            return ""
        first = first or outside[0]
    return first


def _needed(call: CollectiveCall, pair: Buffers, process: Process) -> Iterator[tuple[bytes, int]]:
    """The buffers that must lie in a window, with their bytes.

    Since 2.29.2 the receive buffer of AllGather and the send buffer of ReduceScatter are enough.
    """
    size_bytes = call_bytes(call) or 0
    large = size_bytes * call.ranks
    relaxed = process.versions.all_from((2, 29, 2))
    if not (relaxed and call.operation == "AllGather"):
        yield pair[0], large if call.operation == "ReduceScatter" else size_bytes
    if not (relaxed and call.operation == "ReduceScatter"):
        yield pair[1], large if call.operation == "AllGather" else size_bytes


def _inside(pointer: bytes, size_bytes: int, ranges: list[Range]) -> bool:
    if pointer == b"(nil)":
        return False
    address = int(pointer, 16)
    return any(
        one.start <= address and address + size_bytes <= one.start + one.size_bytes
        for one in ranges
    )


@dataclass(frozen=True)
class CallEvidence:
    """The calls of one `kind` in a group, with the processes and views behind it.

    kind: None for calls that no TUNING line tells about. symmetric_seen: a symmetric line anywhere
    in the job proves its version and its switches, which NCCL requires to be equal on all ranks.
    """

    group: CallGroup
    kind: Kind | None
    job: LoggedJob
    views: tuple[View, ...]
    symmetric_seen: bool = False

    @property
    def key(self) -> CallGroupKey:
        """What the group is about."""
        return self.group.key

    @cached_property
    def processes(self) -> tuple[Process, ...]:
        """Processes that printed evidence of this kind, or called without any."""
        names = [p for p, _, kind in self.group.lines if kind == self.kind]
        names = names or [p for p, _ in self.group.silent]
        return tuple(self.job.processes[name] for name in dict.fromkeys(names))

    @cached_property
    def versions(self) -> Versions:
        """Versions that all of the processes may be."""
        common = ANY
        for process in self.processes:
            common = common.intersection(process.versions) or common
        return common

    @property
    def version_line(self) -> str:
        """The line that states the version, or the line whose form limits it."""
        return next((p.version_line for p in self.processes if p.version_line), self.line)

    @property
    def line(self) -> str:
        """A line that states the choice."""
        return self.group.quotes.get(self.kind, "") if self.kind is not None else ""

    @property
    def call_line(self) -> str:
        """The COLL line of one of the calls."""
        return self.group.call_quotes.get(self.kind, "")

    @property
    def calls(self) -> set[CollectiveCall]:
        """The calls, where COLL lines tell."""
        return self.group.calls.get(self.kind, set())

    @property
    def nodes_view(self) -> View | None:
        """A view that knows the nodes."""
        return next((v for v in self.views if v.nodes is not None), None)

    def lines(self, kind: str) -> Iterator[StateChange]:
        """Lines of this kind about the processes as a whole."""
        return (event for process in self.processes for event in process.about(kind))

    def about(self, kind: str) -> StateChange | None:
        """The first of them."""
        return next(self.lines(kind), None)

    def setting(self, name: str) -> StateChange | None:
        """The ENV line of a variable."""
        return next((event for event in self.lines("env") if event.values[0] == name), None)

    def subsystem_on(self, name: str) -> bool:
        """Whether the log itself says that NCCL_DEBUG_SUBSYS included `name`."""
        event = self.setting("NCCL_DEBUG_SUBSYS")
        words = ("" if event is None else event.values[1] or "").upper().split(",")
        return not words[0].startswith("^") and ("ALL" in words or name in words)

    @cached_property
    def registration_line(self) -> str:
        """A REG line of the processes, for whatever communicator; it proves that REG was on."""
        lines = (e for process in self.processes for e in process.timeline.events("register"))
        found = next(lines, None) or self.about("classic_registration")
        return "" if found is None else found.text
