"""Events of a job: what every process said and called, in its order, over all streams.

A process is a list of state changes and, between them, of counted calls; lines are never kept, so
memory does not grow with the log. TUNING lines follow the COLL lines of their calls in one thread.
A call group is a run of COLL lines and the run of TUNING lines behind it. Calls that print no
TUNING line (empty ones, ranks other than 0, copy engines of 2.28) may stand in it, so a TUNING line
is matched by operation and bytes, never by position alone. Calls of one communicator were launched
together if two of one call group got their TUNING lines: alone, each call prints its line before
the next call begins.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import Final

from reports.nccl.events import (
    ANY,
    MAX_QUOTE_CHARACTERS,
    Buffers,
    Choice,
    CollectiveCall,
    Fact,
    StateChange,
    Versions,
    expected_bytes,
)

# A thread keeps no more open calls than this; older ones got no TUNING line.
MOST_OPEN_CALLS: Final = 64
MOST_ITEMS: Final = 20_000
# Between two state changes no more distinct observations are kept.
MOST_OBSERVATIONS: Final = 20_000
# More distinct buffers of a call than this are not kept.
MOST_BUFFERS: Final = 16
_MOST_CANDIDATES: Final = 12
_QUOTED_BEFORE: Final = 60


@dataclass(slots=True)
class Observation:
    """A choice and the call it was made for; one of them may be missing.

    grouped: the call was launched together with others of its communicator. line, call_line: the
    first that say so. times: how often it was seen. buffers: distinct (send, receive) pointers;
    with more than MOST_BUFFERS there were others.
    """

    choice: Choice | None
    call: CollectiveCall | None
    grouped: bool
    line: str = field(compare=False)
    call_line: str
    times: int = 0
    buffers: set[Buffers] = field(default_factory=set)


Key = tuple[Choice | None, CollectiveCall | None, bool]
Interval = dict[Key, Observation]
"""What was seen between two state changes, by the first fields of an observation."""


@lru_cache(maxsize=4096)
def matched(
    calls: tuple[CollectiveCall, ...], choices: tuple[Choice, ...]
) -> list[tuple[Key, int | None, int | None]]:
    """Of a call group: every call in order, then every TUNING line that no call explains.

    Each with the positions of its COLL and its TUNING line.
    """
    chosen: dict[int, tuple[Choice, int]] = {}
    free: list[tuple[Key, int | None, int | None]] = []
    for position, choice in enumerate(choices):
        members = _members(calls, choice, chosen)
        for at in members:
            chosen[at] = _part_of(choice, calls[at], len(members)), position
        if not members:
            free.append(((choice, None, False), None, position))
    per_comm = Counter(calls[at].comm for at in chosen)
    observed: list[tuple[Key, int | None, int | None]] = []
    for at, call in enumerate(calls):
        own, of = chosen.get(at, (None, None))
        observed.append(((own, call, own is not None and per_comm[call.comm] > 1), at, of))
    return observed + free


def _members(
    calls: Sequence[CollectiveCall], choice: Choice, taken: Collection[int]
) -> tuple[int, ...]:
    """Indices of the calls that `choice` is for; none if no calls fit, or several ways do.

    No line tells about a call that is empty or on one rank.
    """
    fitting = [
        i
        for i, call in enumerate(calls)
        if i not in taken
        and call.elements > 0
        and call.ranks > 1
        and choice.operation in (None, call.operation)
    ]
    if (choice.works or 1) > 1:
        return _batch(calls, choice, fitting)
    exact = [i for i in fitting if expected_bytes(calls[i], choice) == choice.size_bytes]
    # The same call twice over is one answer; two communicators are two.
    return (exact[0],) if len({calls[i].comm for i in exact}) == 1 else ()


def _batch(calls: Sequence[CollectiveCall], choice: Choice, fitting: list[int]) -> tuple[int, ...]:
    """`works` calls of one communicator whose bytes add up to those of the line."""
    works = choice.works or 1
    answers: list[tuple[int, ...]] = []
    for comm in dict.fromkeys(calls[i].comm for i in fitting):
        own = tuple(i for i in fitting if calls[i].comm == comm)
        for option in combinations(own, works) if len(own) <= _MOST_CANDIDATES else [own[:works]]:
            sizes = [expected_bytes(calls[i], choice) or 0 for i in option]
            if len(option) == works and sum(sizes) == choice.size_bytes:
                answers.append(option)
                break
    return answers[0] if len(answers) == 1 else ()


def _part_of(choice: Choice, call: CollectiveCall, members: int) -> Choice:
    """The choice as it counts for one of the `members` calls that it was made for."""
    own = expected_bytes(call, choice)
    return choice._replace(
        operation=call.operation,
        size_bytes=choice.size_bytes if own is None else own,
        works=choice.works if members == 1 else 1,
    )


@dataclass(slots=True, eq=False)
class CallGroup:
    """The open call group of a thread: calls with buffers and line, choices with their line."""

    calls: list[tuple[CollectiveCall, Buffers, bytes]] = field(default_factory=list)
    choices: list[tuple[Choice, bytes]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Process:
    """One process: `items` are state changes, and what was seen between them, in order of the log.

    source: the stream where it was seen first. about: lines about the whole process, one per kind
    and values. lines: with NCCL's prefix. dropped: lines beyond the limits, which are not kept.
    deduplicated: lines that a collector left out and said so. version_line: the line that states
    the version, "" if none does; `versions` then come from the forms of its lines alone.
    """

    name: str = ""
    source: str = ""
    device: str = ""
    items: list[StateChange | Interval] = field(default_factory=list)
    about: dict[tuple[str, tuple[str | None, ...]], StateChange] = field(default_factory=dict)
    groups: defaultdict[bytes, CallGroup] = field(default_factory=lambda: defaultdict(CallGroup))
    registered: set[tuple[str | None, ...]] = field(default_factory=set)
    lines: int = 0
    dropped: int = 0
    deduplicated: int = 0
    versions: Versions = ANY
    version_line: str = ""

    @property
    def host(self) -> str:
        """Where it ran, "" if it is not known."""
        return self.name.rpartition(":")[0]

    @property
    def label(self) -> str:
        """Name with the local device, which is no rank."""
        return f"{self.name} [{self.device}]" if self.device else self.name

    def add(self, thread: bytes, fact: Fact, buffers: Buffers | None, text: bytes) -> None:
        """The next TUNING or COLL line of a thread; buffers: of a COLL line."""
        group = self.groups[thread]
        if isinstance(fact, Choice):
            if not group.calls:
                self._observe((fact, None, False), text)
                return
            group.choices.append((fact, text))
            if len(group.choices) > MOST_OPEN_CALLS:
                self._close(group)
        elif buffers is not None:
            if group.choices:
                self._close(group)
            group.calls.append((fact, buffers, text))
            if len(group.calls) > MOST_OPEN_CALLS:
                call, sent, line = group.calls.pop(0)
                self._observe((None, call, False), b"", sent, line)

    def close(self) -> None:
        """End all call groups: later lines do not belong to calls before this point."""
        for group in self.groups.values():
            if group.calls:
                self._close(group)

    def _close(self, group: CallGroup) -> None:
        calls, choices = group.calls, group.choices
        for key, at, of in matched(
            tuple(call[0] for call in calls), tuple(choice[0] for choice in choices)
        ):
            buffers, call_line = (None, b"") if at is None else calls[at][1:]
            self._observe(key, b"" if of is None else choices[of][1], buffers, call_line)
        calls.clear()
        choices.clear()

    def _observe(
        self, key: Key, line: bytes, buffers: Buffers | None = None, call_line: bytes = b""
    ) -> None:
        if not self.items or isinstance(self.items[-1], StateChange):
            self.items.append(interval := {})
        else:
            interval = self.items[-1]
        seen = interval.get(key)
        if seen is None:
            if len(interval) >= MOST_OBSERVATIONS:
                self.dropped += sum(part is not None for part in key[:2])
                return
            seen = interval[key] = Observation(*key, _shown(line), _shown(call_line))
        seen.times += 1
        if buffers is not None and len(seen.buffers) <= MOST_BUFFERS:
            seen.buffers.add(buffers)

    def change(self, event: StateChange) -> None:
        """A state change: what is open belongs before it. A registration that stands is no change.

        Registrations of a communicator are forgotten where it begins or ends.
        """
        if event.kind == "register":
            if event.values in self.registered:
                return
            self.registered.add(event.values)
        elif event.kind in ("init", "destroy"):
            self.registered = {v for v in self.registered if v[0] != event.values[0]}
        self.close()
        if len(self.items) >= MOST_ITEMS:
            self.dropped += 1
        else:
            self.items.append(event)

    def describe(self, event: StateChange) -> None:
        """A line about the whole process; the first of its kind and values is kept."""
        if len(self.about) < MOST_ITEMS:
            self.about.setdefault((event.kind, event.values), event)

    def events(self, kind: str) -> Iterator[StateChange]:
        """State changes of this kind in order, and lines of this kind about the whole process."""
        changes = (item for item in self.items if isinstance(item, StateChange))
        return (event for event in (*changes, *self.about.values()) if event.kind == kind)

    def intervals(self) -> list[Interval]:
        """What was seen, in each interval between two state changes."""
        return [item for item in self.items if isinstance(item, dict)]

    def observations(self) -> list[Observation]:
        """The same, one by one."""
        return [seen for interval in self.intervals() for seen in interval.values()]

    def facts(self) -> set[Fact]:
        """All that TUNING and COLL lines state."""
        both = (fact for seen in self.observations() for fact in (seen.choice, seen.call))
        return {fact for fact in both if fact is not None}

    def continue_with(self, later: Process) -> None:
        """Append what `later`, the same process further on, has seen; both are closed."""
        self.about = {**later.about, **self.about}
        self.items += later.items
        self.device = self.device or later.device
        self.lines += later.lines
        self.dropped += later.dropped
        self.deduplicated += later.deduplicated


def _shown(text: bytes) -> str:
    """The line for quoting; of a long one the part around NCCL's prefix."""
    if len(text) > MAX_QUOTE_CHARACTERS:
        text = text[max(0, text.find(b" NCCL ") - _QUOTED_BEFORE) :]
    return text.decode("utf-8", "replace")[:MAX_QUOTE_CHARACTERS]
