"""What is known about the calls of one cell: the input of the conditions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from reports.nccl.cells import Cell, CellKey
from reports.nccl.communicators import View
from reports.nccl.job import Job, Process
from reports.nccl.model import Call, Event, Kind
from reports.nccl.version import ANY, Versions


@dataclass(frozen=True)
class Evidence:
    """One cell, or the calls of one `kind` in it, with the processes and views behind it.

    kind: None for calls that no TUNING line tells about. symmetric_seen: a symmetric line anywhere
    in the job proves its version and its switches, which NCCL requires to be equal on all ranks.
    """

    cell: Cell
    kind: Kind | None
    job: Job
    views: tuple[View, ...]
    symmetric_line: str = ""

    @property
    def key(self) -> CellKey:
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
