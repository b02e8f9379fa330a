"""Communicators: one process's view of each, and which views are the same communicator.

A pointer means something inside one process only, and is reused after a communicator has ended. The
`commId` of the INIT lines joins views across processes; communicators made by splitting have none
between 2.24 and 2.30 and are joined by their parent, the count of its splits, and the colour.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from reports.nccl.events import StateChange

GroupKey = tuple[object, ...]


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
        match event.kind:
            case "init":
                self._init(event)
            case "nodes":
                self._nodes(event)
            case "destroy":
                view = self.now.get(event.values[0] or "")
                if view is not None:
                    view.destroyed = True
            case "register":  # a window or a plain registration: the line is the same
                pointer, start, size = (value or "0" for value in event.values)
                first = int(start, 16)
                view = self._registering[event.thread] = self.of(pointer)
                view.ranges.append(range(first, first + int(size)))
            case "window_refused":  # the registration before it in the thread
                self._refuse(event)
            case "not_supported" | "p2p":  # said during initialisation, of no named communicator
                view = self._initialising.get(event.thread)
                if view is not None:
                    view.said[event.kind] = event

    def _refuse(self, event: StateChange) -> None:
        view = self._registering.pop(event.thread, None)
        if view is not None and view.ranges:
            view.ranges.pop()
            view.said[event.kind] = event

    def _init(self, event: StateChange) -> None:
        """Begin or complete a communicator."""
        pointer, rank, ranks, _, comm_id, parent, number, colour, stage = (
            value or "" for value in event.values
        )
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
        self._initialising[event.thread] = view

    def _nodes(self, event: StateChange) -> None:
        """Ranks, nodes and local ranks of a communicator that is being initialised."""
        pointer, rank, ranks, nodes = (value or "0" for value in event.values[:4])
        view = self.of(pointer)
        view.rank, view.ranks, view.nodes = int(rank), int(ranks), int(nodes)
        view.said["nodes"] = event
        self._initialising[event.thread] = view

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
