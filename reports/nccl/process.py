"""One process of a log: its state changes in order, and counts of its calls between them.

Lines are never kept, so memory does not grow with the log.

[Note: bursts] In one thread the TUNING lines follow the COLL lines of the calls they were made for.
A burst is a run of COLL lines and the run of TUNING lines behind it; calls that print no TUNING
line (empty ones, ranks other than 0, copy engines of 2.28) may stand in it, so a TUNING line is
matched by operation and bytes and never by position alone. Calls of one communicator were grouped
if at least two of one burst got their TUNING lines after the last COLL line of the burst: without a
group each call prints its own line before the next call begins. Training repeats itself, so each
distinct burst is resolved once, and its calls are counted one by one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

from reports.nccl import grammar
from reports.nccl.model import (
    ANY,
    MAX_QUOTE_CHARACTERS,
    Choice,
    CollectiveCall,
    StateChange,
    Versions,
    expected_bytes,
)

# A thread keeps no more open calls than this; older ones got no TUNING line.
MOST_OPEN_CALLS: Final = 64
MOST_ITEMS: Final = 20_000
# Between two state changes no more distinct observations are kept, and no more bursts known again.
MOST_BURSTS: Final = 20_000
# More distinct lines of a process than this are not known again.
MOST_LINES: Final = 40_000
# More distinct buffers of a call than this are not kept.
MOST_BUFFERS: Final = 16
_MOST_CANDIDATES: Final = 12
_QUOTED_BEFORE: Final = 60

Fact = Choice | CollectiveCall
Buffers = tuple[bytes, bytes]


@dataclass(slots=True)
class Observation:
    """A choice and the call it was made for; one of them may be missing.

    grouped: the call was launched together with others of its communicator. line, call_line: the
    first that say so. times: how often it was seen. buffers: distinct (send, receive) pointers;
    with more than MOST_BUFFERS there were others.
    """

    choice: Choice | None
    call: CollectiveCall | None
    grouped: bool = False
    line: str = field(default="", compare=False)
    call_line: str = ""
    times: int = 0
    buffers: set[Buffers] = field(default_factory=set)


Key = tuple[Choice | None, CollectiveCall | None, bool]
Stretch = dict[Key, Observation]


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
class Line:
    """A TUNING or COLL line of a process, however often it is printed; `text` is the first of them.

    A COLL line is the same whatever its counter, its buffers and its stream.
    """

    fact: Fact
    text: bytes


@dataclass(slots=True)
class Burst:
    """What lines that follow each other say, whenever they do ([Note: bursts]).

    seen: the observation of each call, in order, then of each TUNING line that no call explains.
    explained: how many TUNING lines the calls explain.
    """

    seen: list[Observation]
    explained: int


@dataclass(slots=True, eq=False)
class Thread:
    """One thread and its open burst; `varying` is what differs between repetitions of `calls`."""

    process: Process
    calls: list[Line] = field(default_factory=list)
    varying: list[re.Match[bytes]] = field(default_factory=list)
    choices: list[Line] = field(default_factory=list)

    def add(self, line: Line, varying: re.Match[bytes] | None) -> None:
        """The next line; `varying` is None for a TUNING line."""
        if varying is not None:
            if self.choices:
                self.close()
            self.calls.append(line)
            self.varying.append(varying)
            if len(self.calls) > MOST_OPEN_CALLS:
                self.process.count((self.calls.pop(0),), [self.varying.pop(0)])
        elif self.calls:
            self.choices.append(line)
            if len(self.choices) > MOST_OPEN_CALLS:
                self.close()
        else:
            self.process.count((line,), self.varying)

    def close(self) -> None:
        """End the burst: later lines do not belong to its calls."""
        if self.calls:
            self.process.count((*self.calls, *self.choices), self.varying)
            self.calls.clear()
            self.varying.clear()
            self.choices.clear()


@dataclass(slots=True, eq=False)
class Process:
    """One process: `items` are state changes, and observations between them, in order of the log.

    source: the stream where it was seen first. about: lines about the whole process, one per kind
    and values. remarks: lines that state neither kernel nor call. dropped: state changes beyond the
    limits, which are not kept; beyond: counts observations that are not. explained: TUNING lines
    that calls explain. deduplicated: lines that a collector left out and said so. version_line: the
    line that states the version, "" if none does; `versions` then come from the forms of its lines
    alone.
    """

    name: str = ""
    source: str = ""
    device: str = ""
    items: list[StateChange | Stretch] = field(default_factory=list)
    stretch: Stretch = field(default_factory=dict)
    bursts: dict[tuple[Line, ...], Burst] = field(default_factory=dict)
    about: dict[tuple[str, tuple[str | None, ...]], StateChange] = field(default_factory=dict)
    threads: dict[bytes, Thread] = field(default_factory=dict)
    known: dict[Fact, Line] = field(default_factory=dict)
    registered: set[tuple[str | None, ...]] = field(default_factory=set)
    remarks: int = 0
    explained: int = 0
    dropped: int = 0
    beyond: Observation = field(default_factory=lambda: Observation(None, None))
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

    def thread(self, name: bytes) -> Thread:
        """The thread of this id."""
        return self.threads.setdefault(name, Thread(self))

    def line(self, fact: Fact, text: bytes) -> Line:
        """The line that states this."""
        line = self.known.get(fact)
        if line is None:
            line = Line(fact, text)
            if len(self.known) < MOST_LINES:
                self.known[fact] = line
        return line

    def count(self, lines: tuple[Line, ...], varying: Sequence[re.Match[bytes]]) -> None:
        """A burst: COLL lines, as many as there are in `varying`, and TUNING lines behind them."""
        burst = self.bursts.get(lines)
        if burst is None:
            burst = self._resolved(lines, varying)
            if len(self.bursts) < MOST_BURSTS:
                self.bursts[lines] = burst
        for one in burst.seen:
            one.times += 1
        self.explained += burst.explained
        for one, own in zip(burst.seen, varying, strict=False):
            if len(one.buffers) <= MOST_BUFFERS:
                one.buffers.add((own[1], own[2]))

    def _resolved(self, lines: tuple[Line, ...], varying: Sequence[re.Match[bytes]]) -> Burst:
        calls = [line.fact for line in lines if isinstance(line.fact, CollectiveCall)]
        chosen: dict[int, tuple[Choice, Line]] = {}
        free: list[tuple[Choice, Line]] = []
        explained: list[tuple[int, ...]] = []
        for line in lines:
            if isinstance(line.fact, Choice):
                members = _members(calls, line.fact, chosen)
                for at in members:
                    chosen[at] = _part_of(line.fact, calls[at], len(members)), line
                if members:
                    explained.append(members)
                else:
                    free.append((line.fact, line))
        per_comm = Counter(calls[at].comm for at in chosen)
        seen = []
        for at, (call, own) in enumerate(zip(calls, varying, strict=True)):
            choice, of = chosen.get(at, (None, None))
            grouped = choice is not None and per_comm[call.comm] > 1
            seen.append(self._observation((choice, call, grouped), of, own))
        seen += [self._observation((choice, None, False), line) for choice, line in free]
        lost = sum(all(seen[at] is self.beyond for at in members) for members in explained)
        return Burst([*seen, *[self.beyond] * lost], len(explained) - lost)

    def _observation(
        self, key: Key, line: Line | None, own: re.Match[bytes] | None = None
    ) -> Observation:
        """The one of this stretch, or `beyond`."""
        seen = self.stretch.get(key)
        if seen is None:
            if len(self.stretch) >= MOST_BURSTS:
                return self.beyond
            if not self.stretch:
                self.items.append(self.stretch)
            text = "" if line is None else _shown(line.text)
            call_text = "" if own is None else _shown(_own_text(own))
            seen = self.stretch[key] = Observation(*key, text, call_text)
        return seen

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
            self.stretch, self.bursts = {}, {}

    def describe(self, event: StateChange) -> None:
        """A line about the whole process; the first of its kind and values is kept."""
        if len(self.about) < MOST_ITEMS:
            self.about.setdefault((event.kind, event.values), event)

    def events(self, kind: str) -> Iterator[StateChange]:
        """State changes of this kind in order, and lines of this kind about the whole process."""
        changes = (item for item in self.items if isinstance(item, StateChange))
        return (event for event in (*changes, *self.about.values()) if event.kind == kind)

    @property
    def lines(self) -> int:
        """Lines with NCCL's prefix."""
        counted = sum(one.times for stretch in self.stretches() for one in stretch.values())
        return self.remarks + counted + self.beyond.times + self.explained

    def stretches(self) -> list[Stretch]:
        """The observations, in each stretch between two state changes."""
        return [item for item in self.items if isinstance(item, dict)]

    def facts(self) -> set[Fact]:
        """All that TUNING and COLL lines state."""
        both = (fact for stretch in self.stretches() for key in stretch for fact in key[:2])
        return {fact for fact in both if fact is not None}

    def close(self) -> None:
        """End all bursts: later lines do not belong to calls before this point."""
        for thread in self.threads.values():
            thread.close()

    def continue_with(self, later: Process) -> None:
        """Append what `later`, the same process further on, has seen; both are closed."""
        self.about = {**later.about, **self.about}
        self.items += later.items
        self.device = self.device or later.device
        self.remarks += later.remarks
        self.explained += later.explained
        self.dropped += later.dropped
        self.beyond.times += later.beyond.times
        self.deduplicated += later.deduplicated


def _own_text(own: re.Match[bytes]) -> bytes:
    """A COLL line from its prefix on, of what was searched for its counter and its buffers."""
    text = grammar.plain(own.string.replace(b"\0", b""))
    header = next(grammar.headers(text), None)
    return text if header is None else text[header.start :]


def _shown(text: bytes) -> str:
    """The line for quoting; of a long one the part around NCCL's prefix."""
    if len(text) > MAX_QUOTE_CHARACTERS:
        text = text[max(0, text.find(b" NCCL ") - _QUOTED_BEFORE) :]
    return text.decode("utf-8", "replace")[:MAX_QUOTE_CHARACTERS]
