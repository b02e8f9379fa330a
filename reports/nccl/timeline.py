"""One process of a log: its state changes in order, and tallies of its calls between them.

Lines are never kept, so memory does not grow with the log.

[Note: bursts] In one thread the TUNING lines follow the COLL lines of the calls they were made for.
A burst is a run of COLL lines and the run of TUNING lines behind it; calls that print no TUNING
line (empty ones, ranks other than 0, copy engines of 2.28) may stand in it, so a TUNING line is
matched by operation and bytes and never by position alone. Calls of one communicator were grouped
if at least two of one burst got their TUNING lines after the last COLL line of the burst: without a
group each call prints its own line before the next call begins.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import Final

from reports.nccl.model import (
    MAX_QUOTE_CHARACTERS,
    Buffers,
    Choice,
    CollectiveCall,
    Observation,
    Sightings,
    StateChange,
    Tally,
    expected_bytes,
)

# A thread keeps no more open calls than this; older ones got no TUNING line.
MOST_OPEN_CALLS: Final = 64
MOST_ITEMS: Final = 20_000
MOST_OBSERVATIONS: Final = 20_000
_MOST_CANDIDATES: Final = 12
_QUOTED_BEFORE: Final = 60


@lru_cache(1 << 16)
def resolve_burst(
    calls: tuple[CollectiveCall, ...], choices: tuple[Choice, ...]
) -> tuple[Observation, ...]:
    """One observation per call and per TUNING line that no call explains, in that order."""
    chosen: dict[int, Choice] = {}
    free: list[Choice] = []
    for choice in choices:
        members = _members(calls, choice, chosen)
        if members is None:
            free.append(choice)
        for index in members or ():
            chosen[index] = _part_of(choice, calls[index], len(members or ()))
    per_comm = Counter(calls[index].comm for index in chosen)
    found = [
        Observation(chosen.get(i), call, i in chosen and per_comm[call.comm] > 1)
        for i, call in enumerate(calls)
    ]
    return (*found, *(Observation(choice, None) for choice in free))


def _members(
    calls: tuple[CollectiveCall, ...], choice: Choice, taken: dict[int, Choice]
) -> tuple[int, ...] | None:
    """Indices of the calls that `choice` is for; None if no calls fit, or several ways do.

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
    return (exact[0],) if len({calls[i].comm for i in exact}) == 1 else None


def _batch(
    calls: tuple[CollectiveCall, ...], choice: Choice, fitting: list[int]
) -> tuple[int, ...] | None:
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
    return answers[0] if len(answers) == 1 else None


def _part_of(choice: Choice, call: CollectiveCall, members: int) -> Choice:
    """The choice as it counts for one of the `members` calls that it was made for."""
    own = expected_bytes(call, choice)
    return choice._replace(
        operation=call.operation,
        size_bytes=choice.size_bytes if own is None else own,
        works=choice.works if members == 1 else 1,
    )


@dataclass(slots=True, eq=False)
class Thread:
    """The open burst of one thread ([Note: bursts]), each line with its text."""

    calls: list[tuple[CollectiveCall, Buffers, bytes]] = field(default_factory=list)
    choices: list[tuple[Choice, bytes]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Timeline:
    """One process: `items` are events and tallies in the order of the log.

    tally: since the last event; the last of `items` where it holds anything. about: lines about the
    whole process, one per kind and values. dropped: state changes and observations beyond the
    limits, which are not kept. deduplicated: lines that a collector left out and said so.
    """

    items: list[StateChange | Tally] = field(default_factory=list)
    tally: Tally = field(default_factory=dict)
    about: dict[tuple[str, tuple[str | None, ...]], StateChange] = field(default_factory=dict)
    threads: dict[bytes, Thread] = field(default_factory=dict)
    registered: set[tuple[str | None, ...]] = field(default_factory=set)
    device: str = ""
    lines: int = 0
    dropped: int = 0
    deduplicated: int = 0

    def add_call(self, thread: Thread, call: CollectiveCall, buffers: Buffers, text: bytes) -> None:
        """A COLL line, in the order of its thread."""
        self.lines += 1
        if thread.choices:
            self._close_burst(thread)
        thread.calls.append((call, buffers, text))
        if len(thread.calls) > MOST_OPEN_CALLS:
            self._resolve([thread.calls.pop(0)], [])

    def add_choice(self, thread: Thread, choice: Choice, text: bytes) -> None:
        """A TUNING line, in the order of its thread."""
        self.lines += 1
        if not thread.calls:
            self._observe(Observation(choice, None), text)
            return
        thread.choices.append((choice, text))
        if len(thread.choices) > MOST_OPEN_CALLS:
            self._close_burst(thread)

    def _close_burst(self, thread: Thread) -> None:
        self._resolve(thread.calls, thread.choices)
        thread.calls.clear()
        thread.choices.clear()

    def _resolve(
        self,
        calls: list[tuple[CollectiveCall, Buffers, bytes]],
        choices: list[tuple[Choice, bytes]],
    ) -> None:
        found = resolve_burst(
            tuple([call for call, _, _ in calls]), tuple([choice for choice, _ in choices])
        )
        for index, observation in enumerate(found):
            text = b""
            if observation.choice is not None:
                # A part of a launch of several calls has no line of its own.
                own = [line for choice, line in choices if choice == observation.choice]
                text = own[0] if own else choices[0][1]
            self._observe(observation, text, *(calls[index][1:] if index < len(calls) else ()))

    def _observe(
        self,
        observation: Observation,
        text: bytes,
        buffers: Buffers | None = None,
        call_text: bytes = b"",
    ) -> None:
        seen = self.tally.get(observation)
        if seen is not None:
            seen.count += 1
        elif len(self.tally) >= MOST_OBSERVATIONS:
            self.dropped += 1
            return
        else:
            if not self.tally:
                self.items.append(self.tally)
            seen = self.tally[observation] = Sightings(1, _shown(text), _shown(call_text))
        if buffers is not None:
            seen.add_buffers(buffers)

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
            self.tally = {}

    def describe(self, event: StateChange) -> None:
        """A line about the whole process; the first of its kind and values is kept."""
        if len(self.about) < MOST_ITEMS:
            self.about.setdefault((event.kind, event.values), event)

    def events(self, kind: str) -> list[StateChange]:
        """State changes of this kind, in order."""
        return [item for item in self.items if isinstance(item, StateChange) and item.kind == kind]

    def tallies(self) -> list[Tally]:
        """What was observed, in each stretch between two state changes."""
        return [item for item in self.items if isinstance(item, dict)]

    def close(self) -> None:
        """End all bursts: later lines do not belong to calls before this point."""
        for thread in self.threads.values():
            if thread.calls:
                self._close_burst(thread)

    def continue_with(self, later: Timeline) -> None:
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
