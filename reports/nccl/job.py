"""All processes of the logs that were read, each with one timeline.

Communicators: one process's view of each, and which views are the same communicator.

A pointer means something inside one process only, and is reused after a communicator has ended. The
`commId` of the INIT lines joins views across processes; communicators made by splitting have none
since 2.24 and are joined by their parent, the count of its splits, and the colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from reports.nccl.model import ANY, Event, Unread, Versions, parse
from reports.nccl.reading import Found
from reports.nccl.source import Source
from reports.nccl.timeline import Timeline

GroupKey = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """A registered range of addresses."""

    start: int
    size_bytes: int


@dataclass(eq=False)
class View:
    """A communicator as one process sees it; None and "" where no line says.

    split: (parent, number of the split, colour). begins: how many communicators had this pointer
    before.
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
    init_line: str = ""
    nodes_line: str = ""
    not_supported_line: str = ""
    p2p: tuple[str | None, ...] = ()
    p2p_line: str = ""
    ranges: list[Range] = field(default_factory=list)

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
        view = View(self.process, pointer, begins)
        self.now[pointer] = view
        self.all.append(view)
        return view

    def take(self, event: Event) -> None:
        """One state change."""
        handler = _HANDLERS.get(event.kind)
        if handler is not None:
            handler(self, event)

    def init(self, event: Event) -> None:
        """Begin or complete a communicator."""
        pointer, rank, ranks, _, comm_id, parent, number, colour, stage = event.values
        view = self.now.get(str(pointer))
        changed = view is not None and comm_id and view.comm_id and view.comm_id != comm_id
        if view is None or view.destroyed or changed or (view.complete and view.init_line):
            view = self._begin(str(pointer))
        view.rank, view.ranks = int(rank or 0), int(ranks or 0)
        view.comm_id = comm_id or view.comm_id
        view.init_line = view.init_line or event.text
        if parent and not view.comm_id:
            self._split(view, parent, number or "", colour or "")
        view.complete = stage == "COMPLETE"
        self._initialising[event.thread] = view

    def _split(self, view: View, parent: str, number: str, colour: str) -> None:
        known = self.now.get(parent)
        if known is not None and known is not view:
            view.split = (known, number, colour)

    def nodes(self, event: Event) -> None:
        """Ranks, nodes and local ranks of a communicator that is being initialised."""
        pointer, rank, ranks, nodes = event.values[:4]
        view = self.of(str(pointer))
        view.rank, view.ranks, view.nodes = int(rank or 0), int(ranks or 0), int(nodes or 0)
        view.nodes_line = event.text
        view.init_line = view.init_line or ("" if view.complete else event.text)
        self._initialising[event.thread] = view

    def destroy(self, event: Event) -> None:
        """The end of a communicator; its pointer may come back."""
        view = self.now.get(str(event.values[0]))
        if view is not None:
            view.destroyed = True

    def register(self, event: Event) -> None:
        """A window or a plain registration: the line is the same."""
        pointer, start, size = event.values
        view = self.of(str(pointer))
        view.ranges.append(Range(int(start or "0", 16), int(size or 0)))

    def not_supported(self, event: Event) -> None:
        """Said while a communicator is initialised, without naming it."""
        view = self._initialising.get(event.thread)
        if view is not None:
            view.not_supported_line = event.text

    def p2p(self, event: Event) -> None:
        """Connectivity, said while a communicator is initialised, without naming it."""
        view = self._initialising.get(event.thread)
        if view is not None:
            view.p2p, view.p2p_line = event.values, event.text

    def only_candidate(self, *, every_rank: bool) -> View | None:
        """The one communicator whose TUNING lines this process can have printed, if it is one.

        Ranks other than 0 print no TUNING line but, in 2.27, symmetric ones. Only communicators
        that INIT lines describe count, so without those there is no answer.
        """
        alive = [
            view
            for view in self.now.values()
            if view.init_line and not view.destroyed and (view.ranks or 0) > 1
        ]
        if not alive or any(not v.init_line and not v.destroyed for v in self.now.values()):
            return None
        printing = [view for view in alive if every_rank or view.rank == 0]
        return printing[0] if len(printing) == 1 else None


_HANDLERS = {
    "init": Views.init,
    "nodes": Views.nodes,
    "destroy": Views.destroy,
    "register": Views.register,
    "not_supported": Views.not_supported,
    "p2p": Views.p2p,
}


def registering_views(timeline: Timeline, process: str) -> set[tuple[str, int]]:
    """(pointer, begins) of the communicators of a process that register anything at any time."""
    views = Views(process)
    for item in timeline.items:
        if isinstance(item, Event):
            views.take(item)
        else:
            for observation in item:
                if observation.call is not None:
                    views.of(observation.call.comm, observation.call.ranks)
    return {(view.pointer, view.begins) for view in views.all if view.ranges}


# A process whose name ends in that of a process of a hundred times its lines is a glued prefix.
_GLUED_RATIO = 50


@dataclass
class Process:
    """One process of the job. source: the stream where it was seen first.

    version_line: the line that states the version, "" if none does; `versions` then come from the
    forms of its lines alone.
    """

    name: str
    timeline: Timeline
    source: str
    versions: Versions = ANY
    version_line: str = ""

    @property
    def label(self) -> str:
        """Name with the local device, which is no rank."""
        return f"{self.name} [{self.timeline.device}]" if self.timeline.device else self.name

    def standing(self, kind: str) -> list[Event]:
        """Lines of this kind about the process as a whole."""
        return [e for (k, _), e in self.timeline.standing.items() if k == kind]


@dataclass
class Job:
    """Everything that was read, in an order that does not depend on how processes interleave."""

    processes: dict[str, Process]
    unread: Unread = field(default_factory=Unread)
    remarks: list[str] = field(default_factory=list)
    bytes_read: int = 0
    iterations_seen: int | None = None
    manual_registration: str = ""

    @property
    def lines(self) -> int:
        """Lines with a NCCL prefix."""
        return sum(process.timeline.lines for process in self.processes.values())

    @property
    def hosts(self) -> set[str]:
        """Hosts that printed something."""
        return {name.rpartition(":")[0] for name in self.processes}


def make_job(sources: Sequence[Source], found: Sequence[Found]) -> Job:
    """Join the streams in their order, and say what does not fit together."""
    job = Job({})
    for source, one in zip(sources, found, strict=True):
        for timeline in one.timelines.values():
            timeline.close()
        _drop_glued(one)
        for key, timeline in sorted(one.timelines.items()):
            _place(job, key.decode("ascii", "replace"), timeline, source.name)
        job.unread.add(one.unread)
        job.remarks += one.problems
        job.bytes_read += one.bytes_read
        if one.iteration is not None:
            job.iterations_seen = max(job.iterations_seen or 0, one.iteration)
        for (kind, _), event in one.stray.standing.items():
            if kind == "manual_registration":
                job.manual_registration = job.manual_registration or event.text
        _stray_version(job, one, source.name)
    job.processes = dict(sorted(job.processes.items()))
    _settle_versions(job)
    return job


def _drop_glued(found: Found) -> None:
    """Remove processes whose host is another one's with a piece of a line in front."""
    by_pid: dict[bytes, list[bytes]] = {}
    for key in found.timelines:
        by_pid.setdefault(key.rpartition(b":")[2], []).append(key)
    for keys in by_pid.values():
        for long in keys if len(keys) > 1 else ():
            for short in keys:
                if (
                    long != short
                    and long.endswith(short)
                    and long in found.timelines
                    and found.timelines[long].lines * _GLUED_RATIO < found.timelines[short].lines
                ):
                    found.unread.damaged += found.timelines.pop(long).lines


def _place(job: Job, name: str, timeline: Timeline, source: str) -> None:
    known = job.processes.get(name)
    if known is None:
        job.processes[name] = Process(name, timeline, source)
    elif known.source == source:
        known.timeline.continue_with(timeline)
    elif _is_copy(known.timeline, timeline):
        job.remarks.append(f"{source}: {name} is in {known.source} too and was counted once")
        if timeline.lines > known.timeline.lines:
            job.processes[name] = Process(name, timeline, source)
    elif _begins_anew(known.timeline, timeline):
        job.processes[f"{name} in {source}"] = Process(f"{name} in {source}", timeline, source)
    else:
        known.timeline.continue_with(timeline)
        known.timeline.close()


def _ranks(timeline: Timeline) -> dict[str, str]:
    """Rank by communicator id, as the INIT lines say."""
    found: dict[str, str] = {}
    for item in timeline.items:
        if isinstance(item, Event) and item.kind == "init" and item.values[4]:
            found.setdefault(str(item.values[4]), str(item.values[1]))
    return found


def _is_copy(one: Timeline, other: Timeline) -> bool:
    mine, theirs = _ranks(one), _ranks(other)
    shared = mine.keys() & theirs.keys()
    if shared:
        return all(mine[comm] == theirs[comm] for comm in shared)
    return one.lines == other.lines and one.items == other.items


def _begins_anew(one: Timeline, other: Timeline) -> bool:
    """Whether two streams with the same host and process id are two processes (containers)."""
    if _ranks(one) and _ranks(other):
        return True
    return any(k == "version" for k, _ in one.standing) and any(
        k == "version" for k, _ in other.standing
    )


def _stray_version(job: Job, found: Found, source: str) -> None:
    """A bare version line speaks for the processes of its stream that state none themselves."""
    events = [e for (kind, _), e in found.stray.standing.items() if kind == "version"]
    versions = {event.values[0] for event in events}
    if len(versions) != 1:
        if versions:
            shown = ", ".join(sorted(str(v) for v in versions))
            job.remarks.append(f"{source}: version lines of several versions: {shown}")
        return
    for process in job.processes.values():
        if process.source == source and not process.standing("version"):
            process.timeline.describe(events[0])


def _settle_versions(job: Job) -> None:
    """Exact versions where lines state them; else what the forms of lines leave possible."""
    stated: dict[Versions, str] = {}
    for process in job.processes.values():
        for event in process.standing("version"):
            version = parse(event.values[0] or "")
            if version is not None:
                process.versions = Versions(version, version)
                process.version_line = event.text
                stated.setdefault(process.versions, event.text)
                break
    if len(stated) > 1:
        shown = ", ".join(sorted(map(str, stated)))
        job.remarks.append(f"the processes state different versions of NCCL: {shown}")
    common: Versions | None = next(iter(stated)) if len(stated) == 1 else ANY
    forms = {name: _forms(process) for name, process in job.processes.items()}
    for form in forms.values():
        common = None if common is None else common.meet(form)
    for name, process in job.processes.items():
        if process.version_line:
            if process.versions.meet(forms[name]) is None:
                job.remarks.append(
                    f"{name} states version {process.versions}, which does not print lines of its"
                    " forms: a fork, or another library than the one that states it"
                )
            continue
        process.versions = forms[name] if common is None else common
        if len(stated) == 1 and common is not None:
            process.version_line = next(iter(stated.values()))


def _forms(process: Process) -> Versions:
    """Versions that print all of the TUNING lines of the process."""
    versions: Versions = ANY
    for item in process.timeline.items:
        if isinstance(item, Event):
            continue
        for observation in item:
            choice = observation.choice
            met = versions if choice is None else versions.meet(choice.versions)
            if met is None:
                return ANY
            versions = met
    return versions
