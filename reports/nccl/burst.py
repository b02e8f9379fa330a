"""Which COLL line a TUNING line belongs to, within one thread of one process.

[Note: bursts] In one thread the TUNING lines follow the COLL lines of the calls they were made for.
A burst is a run of COLL lines and the run of TUNING lines behind it; calls that print no TUNING
line (empty ones, ranks other than 0, copy engines of 2.28) may stand in it, so a TUNING line is
matched by operation and bytes and never by position alone. Calls of one communicator were grouped
if at least two of one burst got their TUNING lines after the last COLL line of the burst: without a
group each call prints its own line before the next call begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from reports.nccl.model import Call, Choice, Observation, call_bytes, total_bytes

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
