"""What was chosen for the calls of each communicator, operation, size, phase and kind of kernel.

Every process is walked through in order, so that each call meets the communicators and the
registrations of its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NamedTuple

from reports.nccl.communicators import GroupKey, View, Views
from reports.nccl.events import (
    ANY,
    SCALED_BY_RANKS,
    Buffers,
    BytesAre,
    Choice,
    CollectiveCall,
    Kind,
    StateChange,
    Versions,
    call_bytes,
)
from reports.nccl.job import LoggedJob
from reports.nccl.timeline import MOST_BUFFERS, Observation, Process

Phase = Literal["before", "after", ""]
UNKNOWN_OPERATION: Final = "(operation not printed)"
_MOST_CALLS: Final = 32


class CallKey(NamedTuple):
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
class Calls:
    """Evidence by key and kind, and all views by communicator."""

    job: LoggedJob
    by_key: dict[CallKey, dict[Kind | None, CallEvidence]] = field(default_factory=dict)
    views: dict[GroupKey, list[View]] = field(default_factory=dict)


@dataclass
class CallEvidence:
    """What the log shows of the calls of one key and kind; None: of which no TUNING line tells.

    lines: TUNING lines by process. works: calls that they are for; unmatched: those of `works`
    whose COLL line is not known. kernels: their names. line: one
    that states the choice. call_line: the COLL line of one of `calls`. grouped: of so many lines
    the call was launched together with others. outside: as of `buffer_outside`, each distinct
    answer once. eliminated: the communicator is the only one that can have printed the line.
    batched: bytes are summed over calls that are not known.
    """

    made: Calls
    key: CallKey
    kind: Kind | None
    lines: Counter[str] = field(default_factory=Counter)
    works: Counter[str] = field(default_factory=Counter)
    unmatched: Counter[str] = field(default_factory=Counter)
    kernels: list[str] = field(default_factory=list)
    line: str = ""
    call_line: str = ""
    calls: set[CollectiveCall] = field(default_factory=set)
    grouped: int = 0
    grouped_quote: str = ""
    outside: list[str] = field(default_factory=list)
    every_rank: bool = False
    eliminated: bool = False
    batched: bool = False

    @property
    def job(self) -> LoggedJob:
        """All that was read."""
        return self.made.job

    @property
    def views(self) -> Sequence[View]:
        """The communicator as its processes see it; nothing if it is not known."""
        return self.made.views.get(self.key.group, ())

    @property
    def processes(self) -> list[Process]:
        """Processes that printed evidence of this kind, or called without any."""
        return [self.job.processes[name] for name in self.works]

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
    def nodes_view(self) -> View | None:
        """A view that knows the nodes."""
        return next((v for v in self.views if v.nodes is not None), None)

    def events(self, kind: str) -> Iterator[StateChange]:
        """Lines of this kind about the processes."""
        return (event for process in self.processes for event in process.events(kind))

    def about(self, kind: str) -> StateChange | None:
        """The first of them."""
        return next(self.events(kind), None)

    def setting(self, name: str) -> StateChange | None:
        """The ENV line of a variable."""
        return next((event for event in self.events("env") if event.values[0] == name), None)

    def subsystem_on(self, name: str) -> bool:
        """Whether the log itself says that NCCL_DEBUG_SUBSYS included `name`."""
        event = self.setting("NCCL_DEBUG_SUBSYS")
        words = ("" if event is None else event.values[1] or "").upper().split(",")
        return not words[0].startswith("^") and ("ALL" in words or name in words)

    @cached_property
    def registration_line(self) -> str:
        """A REG line of the processes, for whatever communicator; it proves that REG was on."""
        found = self.about("register") or self.about("classic_registration")
        return "" if found is None else found.text


class _TimedObservation(NamedTuple):
    """An observation in its time. view: its communicator, None if it is not known.

    eliminated: it is the only one that can have printed the line. registered: something had been,
    on the communicator or, if that is not known, in the process. outside: as of `buffer_outside`.
    """

    seen: Observation
    view: View | None
    eliminated: bool
    registered: bool
    outside: str


def calls_of(job: LoggedJob, after_iteration: int = 0) -> Calls:
    """Walk through every process in order; calls count once so many iterations have ended."""
    found = Calls(job)
    for process in job.processes.values():
        _CallCounter(found, process).run(after_iteration)
    return found


class _CallCounter:
    """One process."""

    def __init__(self, found: Calls, process: Process) -> None:
        self._found = found
        self._process = process
        self._views = Views(process.name)
        # Every call prints a COLL line, so a TUNING line whose operation and bytes only one
        # communicator of the process ever called belongs to that one, whichever thread printed it.
        self._callers: dict[tuple[str, int], set[str]] = {}
        for call in process.facts():
            if isinstance(call, CollectiveCall):
                key = (call.operation, call_bytes(call) or -1)
                self._callers.setdefault(key, set()).add(call.comm)

    def run(self, after_iteration: int) -> None:
        """Meet everything in its time; only the end of the log tells what was yet to come."""
        met: list[_TimedObservation] = []
        iteration, registered = 0, False
        for item in self._process.items:
            if not isinstance(item, StateChange):
                now = [self._meet(one, registered=registered) for one in item.values()]
                met += now if iteration >= after_iteration else ()
            elif item.kind == "iteration":
                iteration = int(item.values[0] or 0)
            else:
                registered |= item.kind == "register"
                self._views.take(item)
        for view in self._views.all:
            self._found.views.setdefault(view.key, []).append(view)
        for one in met:
            self._count(one, ever_registered=registered)

    def _meet(self, seen: Observation, *, registered: bool) -> _TimedObservation:
        choice, call = seen.choice, seen.call
        view, eliminated = self._view_of(choice, call)
        outside = ""
        if view is not None:
            registered = bool(view.ranges)
            if call is not None and choice is not None:
                outside = buffer_outside(call, seen.buffers, view.ranges, self._process)
        return _TimedObservation(seen, view, eliminated, registered, outside)

    def _count(self, met: _TimedObservation, *, ever_registered: bool) -> None:
        seen, view = met.seen, met.view
        choice, call = seen.choice, seen.call
        if call is not None and (call.elements == 0 or call.ranks <= 1):
            return  # nothing is launched for it
        later = ever_registered if view is None else bool(view.ranges)
        key = self._key(seen, view, "after" if met.registered else "before" if later else "")
        kinds = self._found.by_key.setdefault(key, {})
        kind = None if choice is None else choice.kind
        found = kinds.setdefault(kind, CallEvidence(self._found, key, kind))
        found.eliminated |= met.eliminated
        if call is not None:
            if len(found.calls) < _MOST_CALLS:
                found.calls.add(call)
            found.call_line = found.call_line or seen.call_line
        works = 1 if choice is None else choice.works or 1
        found.works[self._process.name] += seen.times * works
        if choice is None:
            return
        found.lines[self._process.name] += seen.times
        if call is None:
            found.unmatched[self._process.name] += seen.times * works
        if choice.what and choice.what not in found.kernels:
            found.kernels.append(choice.what)
        found.line = found.line or seen.line
        found.every_rank |= choice.printed_by_every_rank
        found.batched |= call is None and works > 1
        if call is not None:
            if seen.grouped:
                found.grouped += seen.times
                found.grouped_quote = found.grouped_quote or seen.call_line
            if met.outside not in found.outside:
                found.outside.append(met.outside)

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

    def _key(self, seen: Observation, view: View | None, phase: Phase) -> CallKey:
        choice, call = seen.choice, seen.call
        operation = call.operation if call is not None else choice.operation if choice else None
        group: GroupKey = ("unknown", self._process.name) if view is None else view.key
        size_bytes, are = _size(choice, call, view)
        return CallKey(group, operation or UNKNOWN_OPERATION, size_bytes, are, phase)


def _size(
    choice: Choice | None, call: CollectiveCall | None, view: View | None
) -> tuple[int, BytesAre]:
    size_bytes = None if call is None else call_bytes(call)
    if size_bytes is not None:
        return size_bytes, "per_rank"
    if choice is None:
        return (call.elements if call is not None else 0), "total"
    if choice.bytes_are != "total" or choice.operation is None:
        return choice.size_bytes, choice.bytes_are
    if choice.operation not in SCALED_BY_RANKS:
        return choice.size_bytes, "per_rank"
    ranks = 0 if view is None else view.ranks or 0
    if ranks and choice.size_bytes % ranks == 0:
        return choice.size_bytes // ranks, "per_rank"
    return choice.size_bytes, "total"


def buffer_outside(
    call: CollectiveCall, buffers: Collection[Buffers], ranges: list[range], process: Process
) -> str:
    """The address of a buffer that had to be registered and lay outside every registered range.

    Only what holds for all seen buffers of these calls is stated: with more distinct buffers than
    are kept, or with some inside, there is no answer, "".
    """
    if not ranges or len(buffers) > MOST_BUFFERS:
        return ""
    first = ""
    for pair in sorted(buffers):
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


def _inside(pointer: bytes, size_bytes: int, ranges: list[range]) -> bool:
    if pointer == b"(nil)":
        return False
    address = int(pointer, 16)
    return any(one.start <= address and address + size_bytes <= one.stop for one in ranges)
