"""Replaying timelines: what was chosen, per communicator, operation, size and phase.

What is known about the calls of one cell: the input of the conditions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal

from reports.nccl.job import GroupKey, Job, Process, Range, View, Views, registering_views
from reports.nccl.model import (
    ANY,
    SCALED_BY_RANKS,
    BytesAre,
    Call,
    Choice,
    Event,
    Kind,
    Observation,
    Seen,
    Versions,
    call_bytes,
)

Phase = Literal["before", "after", ""]
UNKNOWN_OPERATION: Final = "(operation not printed)"
_MOST_CALLS: Final = 32


@dataclass(frozen=True, slots=True)
class CallGroupKey:
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
    """What the log shows for one key. Counts are of lines, by (process, iterations ended, kind).

    outside: as of `buffer_outside`, each distinct answer once.
    """

    key: CallGroupKey
    lines: Counter[tuple[str, int, Kind]] = field(default_factory=Counter)
    works: Counter[tuple[str, int, Kind]] = field(default_factory=Counter)
    silent: Counter[tuple[str, int]] = field(default_factory=Counter)
    kernels: Counter[tuple[Kind, str]] = field(default_factory=Counter)
    quotes: dict[Kind, str] = field(default_factory=dict)
    call_quotes: dict[Kind | None, str] = field(default_factory=dict)
    calls: dict[Kind | None, set[Call]] = field(default_factory=dict)
    grouped: int = 0
    grouped_quote: str = ""
    views: dict[str, View] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)
    every_rank: bool = False
    eliminated: bool = False
    batched: bool = False


@dataclass
class Replay:
    """All cells, and all views by communicator."""

    job: Job
    cells: dict[CallGroupKey, CallGroup] = field(default_factory=dict)
    groups: dict[GroupKey, list[View]] = field(default_factory=dict)


def replay(job: Job) -> Replay:
    """Walk through every process in order."""
    made = Replay(job)
    for process in job.processes.values():
        _Walk(made, process).run()
    return made


class _Walk:
    """One process."""

    def __init__(self, made: Replay, process: Process) -> None:
        self._made = made
        self._process = process
        self._views = Views(process.name)
        self._registering = registering_views(process.timeline, process.name)
        self._registered = False
        self._iteration = 0
        self._callers = _callers(process)

    def run(self) -> None:
        for item in self._process.timeline.items:
            if isinstance(item, Event):
                if item.kind == "iteration":
                    self._iteration = int(item.values[0] or 0)
                self._registered |= item.kind == "register"
                self._views.take(item)
                continue
            for observation, seen in item.items():
                self._observe(observation, seen)
        for view in self._views.all:
            self._made.groups.setdefault(view.key, []).append(view)

    def _observe(self, observation: Observation, seen: Seen) -> None:
        view, eliminated = self._view_of(observation)
        cell = self._cell(observation, view)
        if cell is None:
            return
        choice, call = observation.choice, observation.call
        if view is not None:
            cell.views[self._process.name] = view
        cell.eliminated |= eliminated
        kind = None if choice is None else choice.kind
        if call is not None:
            known = cell.calls.setdefault(kind, set())
            if len(known) < _MOST_CALLS:
                known.add(call)
            cell.call_quotes.setdefault(kind, seen.call_line)
        if choice is None or kind is None:
            cell.silent[self._process.name, self._iteration] += seen.count
            return
        place = (self._process.name, self._iteration, kind)
        cell.lines[place] += seen.count
        cell.works[place] += seen.count * (choice.works or 1)
        cell.kernels[kind, choice.what] += seen.count
        cell.quotes.setdefault(kind, seen.line)
        cell.every_rank |= choice.printed_by_every_rank
        cell.batched |= call is None and (choice.works or 1) > 1
        if kind != "symmetric" and call is not None and view is not None:
            self._check(cell, observation, seen, view)

    def _check(self, cell: CallGroup, observation: Observation, seen: Seen, view: View) -> None:
        if observation.grouped:
            cell.grouped += seen.count
            cell.grouped_quote = cell.grouped_quote or seen.call_line
        call = observation.call
        if call is not None:
            outside = buffer_outside(call, seen, view.ranges, self._process)
            if outside not in cell.outside:
                cell.outside.append(outside)

    def _view_of(self, observation: Observation) -> tuple[View | None, bool]:
        """The communicator of an observation, and whether it was found by elimination."""
        if observation.call is not None:
            return self._views.of(observation.call.comm, observation.call.ranks), False
        choice = observation.choice
        if choice is None:
            return None, False
        if self._callers:
            pointers = self._callers.get((choice.operation or "", choice.size_bytes), set())
            if choice.bytes_are == "per_rank" and len(pointers) == 1:
                return self._views.of(next(iter(pointers))), True
            return None, False
        view = self._views.only_candidate(every_rank=choice.printed_by_every_rank)
        return view, view is not None

    def _cell(self, observation: Observation, view: View | None) -> CallGroup | None:
        key = self._key(observation, view)
        if key is None:
            return None
        cell = self._made.cells.get(key)
        if cell is None:
            cell = self._made.cells[key] = CallGroup(key)
        return cell

    def _key(self, observation: Observation, view: View | None) -> CallGroupKey | None:
        choice, call = observation.choice, observation.call
        if call is not None and (call.count == 0 or call.ranks <= 1):
            return None  # nothing is launched for it
        operation = call.operation if call is not None else choice.operation if choice else None
        size, are = _size(choice, call, view)
        group: GroupKey = ("unknown", self._process.name) if view is None else view.key
        return CallGroupKey(group, operation or UNKNOWN_OPERATION, size, are, self._phase(view))

    def _phase(self, view: View | None) -> Phase:
        if view is None:
            if self._registered:
                return "after"
            return "before" if self._registering else ""
        if view.ranges:
            return "after"
        return "before" if (view.pointer, view.begins) in self._registering else ""


def _size(choice: Choice | None, call: Call | None, view: View | None) -> tuple[int, BytesAre]:
    if call is not None:
        size_bytes = call_bytes(call)
        if size_bytes is not None:
            return size_bytes, "per_rank"
    if choice is None:
        return (call.count if call is not None else 0), "total"
    if choice.bytes_are == "per_rank" or choice.operation is None:
        return choice.size_bytes, choice.bytes_are
    if choice.operation not in SCALED_BY_RANKS:
        return choice.size_bytes, "per_rank"
    ranks = 0 if view is None else view.ranks or 0
    if ranks and choice.size_bytes % ranks == 0:
        return choice.size_bytes // ranks, "per_rank"
    return choice.size_bytes, "total"


def _callers(process: Process) -> dict[tuple[str, int], set[str]]:
    """Pointers by (operation, bytes) of all COLL lines of the process.

    Every call prints a COLL line, so a TUNING line whose operation and bytes only one communicator
    of the process ever called belongs to that one, whichever thread printed it.
    """
    found: dict[tuple[str, int], set[str]] = {}
    for item in process.timeline.items:
        for observation in () if isinstance(item, Event) else item:
            call = observation.call
            if call is not None:
                found.setdefault((call.operation, call_bytes(call) or -1), set()).add(call.comm)
    return found


def _needed(call: Call, pair: tuple[bytes, bytes], process: Process) -> Iterator[tuple[bytes, int]]:
    """The buffers that must lie in a window, with their bytes (section 2, condition 7)."""
    size_bytes = call_bytes(call) or 0
    send, receive = pair
    large = size_bytes * call.ranks
    sent = large if call.operation == "ReduceScatter" else size_bytes
    received = large if call.operation == "AllGather" else size_bytes
    relaxed = process.versions.all_from((2, 29, 2))
    if not (relaxed and call.operation == "AllGather"):
        yield send, sent
    if not (relaxed and call.operation == "ReduceScatter"):
        yield receive, received


def buffer_outside(call: Call, seen: Seen, ranges: list[Range], process: Process) -> str:
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
            for pointer, size in _needed(call, pair, process)
            if not _inside(pointer, size, ranges)
        ]
        if not outside:
            return ""
        first = first or outside[0]
    return first


def _inside(pointer: bytes, size_bytes: int, ranges: list[Range]) -> bool:
    try:
        address = int(pointer, 16)
    except ValueError:
        return False
    return any(
        one.start <= address and address + size_bytes <= one.start + one.size_bytes
        for one in ranges
    )


@dataclass(frozen=True)
class CallEvidence:
    """One cell, or the calls of one `kind` in it, with the processes and views behind it.

    kind: None for calls that no TUNING line tells about. symmetric_seen: a symmetric line anywhere
    in the job proves its version and its switches, which NCCL requires to be equal on all ranks.
    """

    cell: CallGroup
    kind: Kind | None
    job: Job
    views: tuple[View, ...]
    symmetric_line: str = ""

    @property
    def key(self) -> CallGroupKey:
        """What the cell is about."""
        return self.cell.key

    @cached_property
    def processes(self) -> tuple[Process, ...]:
        """Processes that printed evidence of this kind, or called without any."""
        names = [p for p, _, kind in self.cell.lines if kind == self.kind]
        names = names or [p for p, _ in self.cell.silent]
        return tuple(self.job.processes[name] for name in dict.fromkeys(names))

    @cached_property
    def versions(self) -> Versions:
        """Versions that all of the processes may be."""
        common = ANY
        for process in self.processes:
            common = common.meet(process.versions) or common
        return common

    @property
    def version_line(self) -> str:
        """The line that states the version, or the line whose form limits it."""
        stated = next((p.version_line for p in self.processes if p.version_line), "")
        return stated or self.line

    @property
    def line(self) -> str:
        """A line that states the choice."""
        return self.cell.quotes.get(self.kind, "") if self.kind is not None else ""

    @property
    def call_line(self) -> str:
        """The COLL line of one of the calls."""
        return self.cell.call_quotes.get(self.kind, "")

    @property
    def calls(self) -> set[Call]:
        """The calls, where COLL lines tell."""
        return self.cell.calls.get(self.kind, set())

    @property
    def ranks(self) -> int | None:
        """Ranks of the communicator."""
        return next((v.ranks for v in self.views if v.ranks), None)

    @property
    def nodes_view(self) -> View | None:
        """A view that knows the nodes."""
        return next((v for v in self.views if v.nodes is not None), None)

    def standing(self, kind: str) -> Iterator[Event]:
        """Lines about the processes as a whole."""
        for process in self.processes:
            yield from process.standing(kind)

    def setting(self, name: str) -> Event | None:
        """The ENV line of a variable."""
        return next((e for e in self.standing("env") if e.values[0] == name), None)

    def subsystem_on(self, name: str) -> bool:
        """Whether the log itself says that NCCL_DEBUG_SUBSYS included `name`."""
        event = self.setting("NCCL_DEBUG_SUBSYS")
        words = ("" if event is None else event.values[1] or "").upper().split(",")
        return bool(words) and not words[0].startswith("^") and ("ALL" in words or name in words)

    @cached_property
    def registration_line(self) -> str:
        """A REG line of the processes, for whatever communicator; it proves that REG was on."""
        for process in self.processes:
            for item in process.timeline.items:
                if isinstance(item, Event) and item.kind == "register":
                    return item.text
        return next((e.text for e in self.standing("classic_registration")), "")

    @property
    def registrations_shown(self) -> bool:
        """Whether a registration would have been printed."""
        return bool(self.registration_line) or self.subsystem_on("REG")
