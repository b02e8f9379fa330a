"""Communicators: one process's view of each, and which views are the same communicator.

A pointer means something inside one process only, and is reused after a communicator has ended. The
`commId` of the INIT lines joins views across processes; communicators made by splitting have none
since 2.24 and are joined by their parent, the count of its splits, and the colour.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from reports.nccl.model import Event
from reports.nccl.timeline import Timeline

GroupKey = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """A registered range of addresses, and the line that says so."""

    start: int
    size_bytes: int
    line: str


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
        pointer, rank, ranks, _, parent, number, colour, comm_id, stage = event.values
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
        view.ranges.append(Range(int(start or "0", 16), int(size or 0), event.text))

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
