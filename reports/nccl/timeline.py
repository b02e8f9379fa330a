"""What is kept of one process of a log: state changes in order, and tallies between them.

Lines themselves are never kept, so memory does not grow with the log. A timeline can be continued
by another one, which is how two workers read two halves of a file.

Which COLL line a TUNING line belongs to, within one thread of one process.

[Note: bursts] In one thread the TUNING lines follow the COLL lines of the calls they were made for.
A burst is a run of COLL lines and the run of TUNING lines behind it; calls that print no TUNING
line (empty ones, ranks other than 0, copy engines of 2.28) may stand in it, so a TUNING line is
matched by operation and bytes and never by position alone. Calls of one communicator were grouped
if at least two of one burst got their TUNING lines after the last COLL line of the burst: without a
group each call prints its own line before the next call begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Final, NamedTuple

from reports.nccl.model import (
    MAX_QUOTE_CHARACTERS,
    Call,
    Choice,
    Event,
    Observation,
    Seen,
    Tally,
    call_bytes,
    total_bytes,
)

# A thread keeps no more open calls than this; older ones got no TUNING line.
MOST_OPEN_CALLS = 64
_MOST_CANDIDATES = 12


def prints_a_choice(call: Call) -> bool:
    """Whether rank 0 prints a TUNING line for the call at all: not if it is empty or alone."""
    return call.count > 0 and call.ranks > 1


def expected_bytes(call: Call, choice: Choice) -> int | None:
    """What the TUNING line of `call` would print in the version of `choice`."""
    size_bytes = call_bytes(call)
    if size_bytes is None or choice.bytes_are == "per_rank":
        return size_bytes
    return total_bytes(call.operation, size_bytes, call.ranks)


def resolve_burst(calls: Sequence[Call], choices: Sequence[Choice]) -> list[Observation]:
    """One observation per call and per TUNING line that no call explains, in that order."""
    chosen: dict[int, Choice] = {}
    free: list[Choice] = []
    for choice in choices:
        members = _members(calls, choice, chosen)
        if members is None:
            free.append(choice)
            continue
        for index in members:
            chosen[index] = _share(calls[index], choice, len(members))
    per_comm: dict[str, int] = {}
    for index in chosen:
        per_comm[calls[index].comm] = per_comm.get(calls[index].comm, 0) + 1
    found = [
        Observation(chosen.get(i), call, i in chosen and per_comm[call.comm] > 1)
        for i, call in enumerate(calls)
    ]
    return found + [Observation(choice, None) for choice in free]


def _members(
    calls: Sequence[Call], choice: Choice, taken: dict[int, Choice]
) -> tuple[int, ...] | None:
    """Indices of the calls that `choice` is for; None if no calls fit, or several ways do."""
    fitting = [
        i
        for i, call in enumerate(calls)
        if i not in taken and prints_a_choice(call) and choice.operation in (None, call.operation)
    ]
    if (choice.works or 1) == 1:
        exact = [i for i in fitting if expected_bytes(calls[i], choice) == choice.size_bytes]
        # The same call twice over is one answer; two communicators are two.
        one = len({calls[i].comm for i in exact}) == 1
        return (exact[0],) if one else None
    return _batch(calls, choice, fitting)


def _batch(calls: Sequence[Call], choice: Choice, fitting: list[int]) -> tuple[int, ...] | None:
    """`works` calls of one communicator whose bytes add up to those of the line."""
    works = choice.works or 1
    answers: list[tuple[int, ...]] = []
    for comm in dict.fromkeys(calls[i].comm for i in fitting):
        own = [i for i in fitting if calls[i].comm == comm]
        options = combinations(own, works) if len(own) <= _MOST_CANDIDATES else [own[:works]]
        for option in options:
            sizes = [expected_bytes(calls[i], choice) for i in option]
            if len(option) == works and sum(s or 0 for s in sizes) == choice.size_bytes:
                answers.append(tuple(option))
                break
    return answers[0] if len(answers) == 1 else None


def _share(call: Call, choice: Choice, members: int) -> Choice:
    """The choice as it counts for one of the `members` calls that it was made for."""
    if choice.operation == call.operation and members == 1:
        return choice
    own = expected_bytes(call, choice)
    works = choice.works if members == 1 else 1
    return replace(
        choice,
        operation=call.operation,
        size_bytes=choice.size_bytes if own is None else own,
        works=works,
    )


# Where a worker starts in the middle of a file, a thread's first lines may belong to calls before
# the cut; so many of them are kept until the halves are joined.
MOST_LEADING: Final = 2 * MOST_OPEN_CALLS
_QUOTED_BEFORE: Final = 60
MOST_ITEMS: Final = 20_000
MOST_OBSERVATIONS: Final = 20_000


class CallLine(NamedTuple):
    """A COLL line: the call (one object per distinct call), its text.

    buffers: the part of the line that names them, as `1f sendbuff P recvbuff P`.
    """

    call: Call
    buffers: bytes
    text: bytes


@dataclass(slots=True, eq=False)
class ChoiceLine:
    """A TUNING line: the choice (one object per distinct choice) and its text."""

    choice: Choice
    text: bytes


Line = CallLine | ChoiceLine
Pair = tuple[int, int]


@dataclass(slots=True)
class Thread:
    """The open burst of one thread, and after a cut its first lines ([Note: bursts])."""

    calls: list[CallLine] = field(default_factory=list)
    choices: list[ChoiceLine] = field(default_factory=list)
    leading: list[Line] = field(default_factory=list)
    collecting: bool = False


@dataclass(slots=True)
class Simple:
    """How often one call was followed by one choice, kept apart because nearly all lines are so."""

    call: Call
    choice: Choice
    seen: Seen

    def count(self, buffers: bytes) -> None:
        """Once more, with these buffers."""
        self.seen.count += 1
        if not self.seen.more_buffers:
            self.seen.add_buffers(buffers)


@dataclass(slots=True)
class Timeline:
    """One process: `items` are events and tallies in the order of the log.

    standing: lines about the whole process, one per kind and values. after_cut: the log begins in
    the middle, so lines may belong to calls that another timeline has. dropped: state changes and
    observations beyond the limits, which are not kept. deduplicated: lines that a collector left
    out and said so.
    """

    after_cut: bool = False
    items: list[Event | Tally] = field(default_factory=list)
    standing: dict[tuple[str, tuple[str | None, ...]], Event] = field(default_factory=dict)
    threads: dict[bytes, Thread] = field(default_factory=dict)
    simple: dict[Pair, Simple] = field(default_factory=dict)
    free: dict[ChoiceLine, int] = field(default_factory=dict)
    registered: set[tuple[str | None, ...]] = field(default_factory=set)
    iteration: int = 0
    device: str = ""
    lines: int = 0
    dropped: int = 0
    deduplicated: int = 0

    def thread(self, tid: bytes) -> Thread:
        """The state of a thread, made when it is first seen."""
        found = self.threads.get(tid)
        if found is None:
            found = self.threads[tid] = Thread(collecting=self.after_cut)
        return found

    def _tally(self) -> Tally:
        if not self.items or isinstance(self.items[-1], Event):
            self.items.append({})
        last = self.items[-1]
        return last if isinstance(last, dict) else {}

    def observe(self, observation: Observation, seen: Seen) -> None:
        """Add to the current tally."""
        tally = self._tally()
        known = tally.get(observation)
        if known is not None:
            known.add(seen)
        elif len(tally) < MOST_OBSERVATIONS:
            tally[observation] = seen
        else:
            self.dropped += seen.count

    def change(self, event: Event) -> None:
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

    def describe(self, event: Event) -> None:
        """A line about the whole process; the first of its kind and values is kept."""
        if len(self.standing) < MOST_ITEMS:
            self.standing.setdefault((event.kind, event.values), event)

    def reach(self, iteration: int) -> None:
        """`iteration` iterations have ended before the next line of this process."""
        if iteration != self.iteration:
            self.iteration = iteration
            self.close()
            self.items.append(Event("iteration", "", (str(iteration),), ""))

    def add(self, thread: Thread, line: Line) -> None:
        """A COLL or TUNING line, in the order of its thread."""
        if thread.collecting:
            self._collect(thread, line)
        elif isinstance(line, CallLine):
            if thread.choices:
                self.close_burst(thread)
            thread.calls.append(line)
            if len(thread.calls) > MOST_OPEN_CALLS:
                self._observe_lines([thread.calls.pop(0)], [])
        elif thread.calls:
            thread.choices.append(line)
            if len(thread.choices) > MOST_OPEN_CALLS:
                self.close_burst(thread)
        else:
            self.add_free(line, 1)

    def add_free(self, line: ChoiceLine, count: int) -> None:
        """TUNING lines that follow no call of their thread."""
        self.free[line] = self.free.get(line, 0) + count

    def _collect(self, thread: Thread, line: Line) -> None:
        """Keep lines until nothing before the cut can matter; trailing calls then start afresh."""
        thread.leading.append(line)
        if not _settled(thread.leading):
            return
        thread.collecting = False
        fresh: list[CallLine] = []
        while thread.leading and isinstance(last := thread.leading[-1], CallLine):
            fresh.insert(0, last)
            thread.leading.pop()
        for call in fresh:
            self.add(thread, call)

    def close_burst(self, thread: Thread) -> None:
        """Resolve the open burst of a thread."""
        calls, choices = thread.calls, thread.choices
        if len(calls) == 1 and len(choices) == 1:
            self.add_simple(calls[0], choices[0])
        else:
            self._observe_lines(calls, choices)
        calls.clear()
        choices.clear()

    def add_simple(self, call: CallLine, choice: ChoiceLine) -> None:
        """One call and the one line behind it, counted now and resolved once per segment."""
        key = (id(call.call), id(choice.choice))
        known = self.simple.get(key)
        if known is None:
            seen = Seen(0, _shown(choice.text), _shown(call.text))
            known = self.simple[key] = Simple(call.call, choice.choice, seen)
        known.count(call.buffers)

    def _observe_lines(self, calls: list[CallLine], choices: list[ChoiceLine]) -> None:
        made = [line.call for line in calls]
        found = resolve_burst(made, [line.choice for line in choices])
        first = choices[0].text if choices else b""
        texts = {line.choice: line.text for line in reversed(choices)}
        for index, observation in enumerate(found):
            choice = observation.choice
            text = b"" if choice is None else texts.get(choice, first)
            seen = Seen(1, _shown(text))
            if index < len(calls):
                seen.call_line = _shown(calls[index].text)
                seen.add_buffers(calls[index].buffers)
            self.observe(observation, seen)

    def drain(self) -> None:
        """Bring what was counted into the tally; open bursts stay open."""
        for line, count in self.free.items():
            self.observe(Observation(line.choice, None), Seen(count, _shown(line.text)))
        self.free.clear()
        for one in self.simple.values():
            found = resolve_burst([one.call], [one.choice])
            attributed = found[0].choice is not None
            self.observe(found[0], one.seen)
            if not attributed:
                self.observe(found[1], Seen(one.seen.count, one.seen.line))
                one.seen.line = ""
        self.simple.clear()

    def close(self) -> None:
        """End all bursts: later lines do not belong to calls before this point."""
        self.after_cut = False
        for thread in self.threads.values():
            thread.collecting = False
            if thread.calls or thread.choices:
                self.close_burst(thread)
        self.drain()

    def continue_with(self, later: Timeline) -> None:
        """Append what `later`, the same process further on, has seen."""
        self._take_leading(later)
        self.drain()
        later.drain()
        self.standing = {**later.standing, **self.standing}
        for item in later.items:
            if isinstance(item, Event):
                self.change(item)
            else:
                for observation, seen in item.items():
                    self.observe(observation, seen)
        for tid, theirs in later.threads.items():
            if theirs.calls or theirs.choices:
                mine = self.thread(tid)
                self.close_burst(mine)
                mine.calls, mine.choices = theirs.calls, theirs.choices
        self.iteration = later.iteration or self.iteration
        self.device = self.device or later.device
        self.lines += later.lines
        self.dropped += later.dropped
        self.deduplicated += later.deduplicated

    def _take_leading(self, later: Timeline) -> None:
        for tid, theirs in later.threads.items():
            mine = self.thread(tid)
            for line in theirs.leading:
                self.add(mine, line)
            if later.after_cut and theirs.collecting:
                continue
            # In `later` a call or an event came next, which ended the burst.
            if theirs.leading and not mine.collecting:
                self.close_burst(mine)


def _settled(lines: list[Line]) -> bool:
    """Whether a call follows a choice that follows a call, or the cut is out of reach."""
    if len(lines) >= MOST_LEADING:
        return True
    called = chosen = False
    for line in lines:
        if isinstance(line, ChoiceLine):
            chosen = called
        elif chosen:
            return True
        else:
            called = True
    return False


def _shown(text: bytes) -> str:
    """The line for quoting; of a long one the part around NCCL's prefix."""
    if len(text) > MAX_QUOTE_CHARACTERS:
        text = text[max(0, text.find(b" NCCL ") - _QUOTED_BEFORE) :]
    return text.decode("utf-8", "replace")[:MAX_QUOTE_CHARACTERS]
