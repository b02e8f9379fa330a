"""What was chosen for the calls of each communicator, operation, size, phase and kind of kernel.

Every process is walked through in order, so that each call is matched with the communicators and
registrations of its time. A pointer means something inside one process only, and is reused after a
communicator has ended. The `commId` of the INIT lines joins views across processes; communicators
made by splitting have none between 2.24 and 2.30 and are joined by their parent, the count of its
splits, and the colour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NamedTuple

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

GroupKey = tuple[object, ...]
Callers = dict[tuple[str, int], set[str]]
Phase = Literal["before", "after", ""]
UNKNOWN_OPERATION: Final = "(operation not printed)"
_MOST_CALLS: Final = 32


@dataclass(eq=False)
class View:
    """A communicator as one process sees it; None and "" where no line says.

    split: (parent, number of the split, colour). begins: how many communicators had this pointer
    before. said: the last line of a kind that is about it. ranges: registered addresses,
    without those whose window was refused.
    """

    process: str
    pointer: str
    begins: int = 0
    rank: int | None = None
    ranks: int | None = None
    nodes: int | None = None
    comm_id: str = ""
    split: tuple[View, str, str] | None = None
    complete: bool = False
    destroyed: bool = False
    said: dict[str, StateChange] = field(default_factory=dict)
    ranges: list[range] = field(default_factory=list)

    @property
    def key(self) -> GroupKey:
        """Equal for views of one communicator, as far as the log can tell."""
        if self.comm_id:
            return ("id", self.comm_id, self.ranks)
        if self.split is not None:
            parent, number, colour = self.split
            if parent.key[0] != "view":
                return ("split", parent.key, number, colour, self.ranks)
        return ("view", self.process, self.pointer, self.begins)


@dataclass
class Views:
    """The communicators of one process while its timeline is walked through."""

    process: str
    now: dict[str, View] = field(default_factory=dict)
    all: list[View] = field(default_factory=list)
    _initialising: dict[str, View] = field(default_factory=dict)
    _registering: dict[str, View] = field(default_factory=dict)

    def of(self, pointer: str, ranks: int | None = None) -> View:
        """The communicator that has this pointer now, made known if it was not."""
        view = self.now.get(pointer)
        if view is None or view.destroyed:
            view = self._begin(pointer)
        if view.ranks is None:
            view.ranks = ranks
        return view

    def _begin(self, pointer: str) -> View:
        begins = sum(view.pointer == pointer for view in self.all)
        view = self.now[pointer] = View(self.process, pointer, begins)
        self.all.append(view)
        return view

    def take(self, event: StateChange) -> None:
        """One state change."""
        values = tuple(value or "" for value in event.values)
        match event.kind:
            case "init":
                self._initialising[event.thread] = self._init(*values)
            case "nodes":
                view = self._initialising[event.thread] = self.of(values[0])
                view.rank, view.ranks, view.nodes = map(int, values[1:4])
                view.said["nodes"] = event
            case "destroy" if values[0] in self.now:
                self.now[values[0]].destroyed = True
            case "register":  # a window or a plain registration: the line is the same
                first = int(values[1], 16)
                view = self._registering[event.thread] = self.of(values[0])
                view.ranges.append(range(first, first + int(values[2])))
            case "window_refused":  # the registration before it in the thread
                refused = self._registering.pop(event.thread, None)
                if refused is not None and refused.ranges:
                    refused.ranges.pop()
                    refused.said[event.kind] = event
            case "not_supported" | "p2p" if event.thread in self._initialising:
                # said during initialisation, of no named communicator
                self._initialising[event.thread].said[event.kind] = event

    def _init(self, pointer: str, rank: str, ranks: str, *more: str) -> View:
        """Begin or complete a communicator."""
        _, comm_id, parent, number, colour, stage = more
        view = self.now.get(pointer)
        changed = view is not None and comm_id and view.comm_id and view.comm_id != comm_id
        if view is None or view.destroyed or changed or view.complete:
            view = self._begin(pointer)
        view.rank, view.ranks = int(rank), int(ranks)
        view.comm_id = comm_id or view.comm_id
        known = self.now.get(parent)
        if known is not None and known is not view and not view.comm_id:
            view.split = (known, number, colour)
        view.complete = stage == "COMPLETE"
        return view

    def only_candidate(self, *, every_rank: bool) -> View | None:
        """The one communicator whose TUNING lines this process can have printed, if it is one.

        Ranks other than 0 print no TUNING line but, in 2.27, symmetric ones. Only communicators
        that INIT lines describe count, so without those there is no answer.
        """
        alive = [view for view in self.now.values() if not view.destroyed]
        if any(view.rank is None for view in alive):
            return None
        alive = [view for view in alive if (view.ranks or 0) > 1]
        printing = [view for view in alive if every_rank or view.rank == 0]
        return printing[0] if len(printing) == 1 else None


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

    def add(
        self, process: str, seen: Observation, view: View | None, phase: Phase, outside: str
    ) -> None:
        """Count what a process printed, unless nothing is launched for it."""
        choice, call = seen.choice, seen.call
        if call is not None and (call.elements == 0 or call.ranks <= 1):
            return
        operation = call.operation if call is not None else choice.operation if choice else None
        group: GroupKey = ("unknown", process) if view is None else view.key
        size_bytes, are = _size(choice, call, view)
        key = CallKey(group, operation or UNKNOWN_OPERATION, size_bytes, are, phase)
        kind = None if choice is None else choice.kind
        kinds = self.by_key.setdefault(key, {})
        evidence = kinds.setdefault(kind, CallEvidence(self, key, kind))
        evidence.eliminated |= call is None and view is not None
        evidence.add(process, seen, outside)


@dataclass
class CallEvidence:
    """What the log shows of the calls of one key and kind; None: of which no TUNING line tells.

    lines: TUNING lines by process. works: calls that they are for; unmatched: those of `works`
    whose COLL line is not known. kernels: their names. channels: those of a launch. line: one that
    states the choice. call_line: the COLL line of one of `calls`. grouped: of so many lines
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
    channels: set[int] = field(default_factory=set)
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
        event = self.about("register") or self.about("classic_registration")
        return "" if event is None else event.text

    def add(self, process: str, seen: Observation, outside: str) -> None:
        """Count what a process printed."""
        choice, call = seen.choice, seen.call
        works = 1 if choice is None else choice.works or 1
        self.works[process] += seen.times * works
        if call is not None:
            if len(self.calls) < _MOST_CALLS:
                self.calls.add(call)
            self.call_line = self.call_line or seen.call_line
        if choice is None:
            return
        self.lines[process] += seen.times
        if choice.what and choice.what not in self.kernels:
            self.kernels.append(choice.what)
        if choice.channels is not None:
            self.channels.add(choice.channels)
        self.line = self.line or seen.line
        self.every_rank |= choice.printed_by_every_rank
        if call is None:
            self.unmatched[process] += seen.times * works
            self.batched |= works > 1
            return
        if seen.grouped:
            self.grouped += seen.times
            self.grouped_quote = self.grouped_quote or seen.call_line
        if outside not in self.outside:
            self.outside.append(outside)


def calls_of(job: LoggedJob, after_iteration: int = 0) -> Calls:
    """Walk through every process in order; calls count once so many iterations have ended."""
    made = Calls(job)
    for process in job.processes.values():
        _add_process(made, process, after_iteration)
    return made


def _add_process(made: Calls, process: Process, after_iteration: int) -> None:
    """Only the end of the log tells what was yet to come: registrations, ids of communicators."""
    views = Views(process.name)
    callers = _callers(process)
    timed: list[tuple[Observation, View | None, bool, str]] = []
    iteration, registered = 0, False
    for item in process.items:
        if isinstance(item, StateChange):
            registered |= item.kind == "register"
            if item.kind == "iteration":
                iteration = int(item.values[0] or 0)
            views.take(item)
            continue
        for seen in item.values():
            view, outside = _view_of(seen, views, callers), ""
            if view is not None and seen.call is not None and seen.choice is not None:
                outside = _buffer_outside(seen.call, seen.buffers, view.ranges, process.versions)
            if iteration >= after_iteration:
                held = registered if view is None else bool(view.ranges)
                timed.append((seen, view, held, outside))
    for view in views.all:
        made.views.setdefault(view.key, []).append(view)
    for seen, view, held, outside in timed:
        later = registered if view is None else bool(view.ranges)
        phase: Phase = "after" if held else "before" if later else ""
        made.add(process.name, seen, view, phase, outside)


def _callers(process: Process) -> Callers:
    """Communicators that ever called, by operation and bytes.

    Every call prints a COLL line, so a TUNING line whose operation and bytes only one communicator
    of the process ever called belongs to that one, whichever thread printed it.
    """
    callers: Callers = {}
    for call in process.facts():
        if isinstance(call, CollectiveCall):
            callers.setdefault((call.operation, call_bytes(call) or -1), set()).add(call.comm)
    return callers


def _view_of(seen: Observation, views: Views, callers: Callers) -> View | None:
    """The communicator of an observation; without a call, the only one that can have printed it."""
    choice, call = seen.choice, seen.call
    if call is not None:
        return views.of(call.comm, call.ranks)
    if choice is None:
        return None
    if not callers:
        return views.only_candidate(every_rank=choice.printed_by_every_rank)
    if choice.bytes_are != "per_rank":
        return None
    pointers = callers.get((choice.operation or "", choice.size_bytes), set())
    return views.of(next(iter(pointers))) if len(pointers) == 1 else None


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


def _buffer_outside(
    call: CollectiveCall, buffers: Collection[Buffers], ranges: list[range], versions: Versions
) -> str:
    """The address of a buffer that had to be registered and lay outside every registered range.

    Only what holds for all seen buffers of these calls is stated: with more distinct buffers than
    are kept, or with some inside, there is no answer, "". Since 2.29.2 the receive buffer of
    AllGather and the send buffer of ReduceScatter are enough.
    """
    if not ranges or len(buffers) > MOST_BUFFERS:
        return ""
    own = call_bytes(call) or 0
    scatters, gathers = call.operation == "ReduceScatter", call.operation == "AllGather"
    relaxed = versions.all_from((2, 29, 2))
    needed = (
        None if relaxed and gathers else own * call.ranks if scatters else own,
        None if relaxed and scatters else own * call.ranks if gathers else own,
    )
    first = ""
    for pair in sorted(buffers):
        outside = [
            pointer.decode()
            for pointer, size_bytes in zip(pair, needed, strict=True)
            if size_bytes is not None and not _inside(pointer, size_bytes, ranges)
        ]
        if not outside:
            return ""
        first = first or outside[0]
    return first


def _inside(pointer: bytes, size_bytes: int, ranges: list[range]) -> bool:
    if pointer == b"(nil)":
        return False
    address = int(pointer, 16)
    return any(span.start <= address and address + size_bytes <= span.stop for span in ranges)
