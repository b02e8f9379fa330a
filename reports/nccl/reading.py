"""Reading all sources with at most two processes, and joining what they found.

A large plain file is cut in the middle, at a line end; the two halves are read at the same time and
their timelines joined in the order of the file. Everything else is shared out file by file.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from reports.nccl.model import Unread
from reports.nccl.scan import Scan
from reports.nccl.source import Source, StoppedError, read_blocks, split_at, whole_lines
from reports.nccl.timeline import Timeline

# Below this a second process costs more than it saves.
WORTH_A_PROCESS_BYTES: Final = 24 << 20
_LOOKED_AT_BYTES: Final = 2 << 20
_LONGEST_SEARCH_BYTES: Final = 8 << 20
_UNPACKED_PER_BYTE: Final = 10


@dataclass(frozen=True)
class Stretch:
    """What one worker reads at a time: `source`, or the bytes [start, end) of it."""

    source: Source
    start: int = 0
    end: int | None = None
    after_cut: bool = False
    hosts: frozenset[bytes] = frozenset()
    boundaries: tuple[tuple[int, int], ...] = ()

    @property
    def weight(self) -> int:
        """Roughly how many bytes there are to read."""
        if self.end is not None:
            return self.end - self.start
        size_bytes = self.source.size_bytes or 0
        factor = 1 if self.source.packed == "" else _UNPACKED_PER_BYTE
        return (size_bytes - self.start) * factor


@dataclass
class Found:
    """What a stretch holds. problems: why reading it ended early."""

    timelines: dict[bytes, Timeline] = field(default_factory=dict)
    stray: Timeline = field(default_factory=Timeline)
    iteration: int | None = None
    unread: Unread = field(default_factory=Unread)
    bytes_read: int = 0
    problems: list[str] = field(default_factory=list)


def read_all(
    sources: Sequence[Source],
    boundaries: dict[str, tuple[tuple[int, int], ...]] | None = None,
    *,
    processes: int = 2,
) -> list[Found]:
    """One `Found` per source, in their order.

    Args:
        sources: what to read.
        boundaries: by source name, (offset, iterations ended) as the run itself has noted them.
        processes: 1 or 2; the result is the same.
    """
    marks = boundaries or {}
    stretches = [s for source in sources for s in _stretches(source, marks, processes)]
    found = _read_stretches(stretches, processes)
    joined: dict[str, Found] = {}
    for stretch, one in zip(stretches, found, strict=True):
        name = stretch.source.name
        if name in joined:
            _join(joined[name], one)
        else:
            joined[name] = one
    return [joined[source.name] for source in sources]


def _stretches(
    source: Source, marks: dict[str, tuple[tuple[int, int], ...]], processes: int
) -> list[Stretch]:
    own = marks.get(source.name, ())
    size_bytes = source.size_bytes or 0
    if processes < 2 or own or not source.can_be_cut or size_bytes < WORTH_A_PROCESS_BYTES:  # noqa: PLR2004
        return [Stretch(source, boundaries=own)]
    with contextlib.suppress(OSError, StoppedError):
        cut = _cut(source, size_bytes // 2)
        if cut is not None:
            near = [(0, _LOOKED_AT_BYTES), (cut, cut + _LOOKED_AT_BYTES)]
            look = Scan()
            for start, end in near:
                for block in whole_lines(read_blocks(source, start, end), lambda: None):
                    look.feed(block)
            hosts = frozenset(look.hosts)
            return [
                Stretch(source, 0, cut, hosts=hosts),
                Stretch(source, cut, None, after_cut=look.calls_seen, hosts=hosts),
            ]
    return [Stretch(source)]


def _cut(source: Source, middle: int) -> int | None:
    """The first line end behind the middle."""
    position = middle
    for block in read_blocks(source, middle, middle + _LONGEST_SEARCH_BYTES):
        found = block.find(b"\n")
        if found >= 0:
            return position + found + 1
        position += len(block)
    return None


def _read_stretches(stretches: list[Stretch], processes: int) -> list[Found]:
    order = sorted(range(len(stretches)), key=lambda i: -stretches[i].weight)
    loads = [0, 0]
    shares: tuple[list[int], list[int]] = ([], [])
    for index in order:
        # What has no size (standard input, a pipe) is read here, not in a child.
        side = 0 if stretches[index].source.size_bytes is None else loads.index(min(loads))
        loads[side] += stretches[index].weight
        shares[side].append(index)
    alone = (
        processes < 2  # noqa: PLR2004
        or sum(loads) < WORTH_A_PROCESS_BYTES
        or not shares[1]
        or not hasattr(os, "fork")
        or threading.active_count() > 1
        or (os.cpu_count() or 1) < 2  # noqa: PLR2004
    )
    if alone:
        return [read_stretch(stretch) for stretch in stretches]
    return _read_in_two(stretches, *shares)


def _read_in_two(stretches: list[Stretch], here: list[int], there: list[int]) -> list[Found]:
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_child(sending, [stretches[i] for i in sorted(there)])
    os.close(sending)
    with os.fdopen(receiving, "rb") as stream:
        try:
            found = {i: read_stretch(stretches[i]) for i in sorted(here)}
            data = stream.read()
        finally:
            stream.close()
            os.waitpid(child, 0)
    try:
        theirs = pickle.loads(data)  # noqa: S301 - written by our own child, through a pipe
    except (EOFError, pickle.UnpicklingError):
        # The child was killed (by the kernel, for memory): its share is read here after all.
        theirs = [read_stretch(stretches[i]) for i in sorted(there)]
    found.update(zip(sorted(there), theirs, strict=True))
    return [found[i] for i in range(len(stretches))]


def _be_the_child(sending: int, share: list[Stretch]) -> None:
    status = 1
    try:
        found = [read_stretch(stretch) for stretch in share]
        with os.fdopen(sending, "wb") as stream:
            pickle.dump(found, stream, protocol=pickle.HIGHEST_PROTOCOL)
        status = 0
    finally:
        os._exit(status)


def read_stretch(stretch: Stretch) -> Found:
    """Read one stretch from its beginning to its end, or to where it cannot be read on."""
    scan = Scan(after_cut=stretch.after_cut, hosts=set(stretch.hosts))
    found = Found(scan.timelines, scan.stray, unread=scan.unread)

    def skipped() -> None:
        scan.unread.overlong += 1

    blocks = whole_lines(
        _counted(read_blocks(stretch.source, stretch.start, stretch.end), found), skipped
    )
    try:
        if stretch.boundaries:
            offsets = [offset for offset, _ in stretch.boundaries]
            for block, passed in split_at(blocks, offsets):
                if passed:
                    scan.reach(stretch.boundaries[passed - 1][1])
                scan.feed(block)
        else:
            for block in blocks:
                scan.feed(block)
    except StoppedError as error:
        found.problems.append(f"{stretch.source.name}: {error}")
    scan.finish()
    for timeline in found.timelines.values():
        timeline.drain()
    found.iteration = scan.iteration
    return found


def _counted(blocks: Iterator[bytes], found: Found) -> Iterator[bytes]:
    for block in blocks:
        found.bytes_read += len(block)
        yield block


def _join(first: Found, second: Found) -> None:
    """Append the second half of a file to the first."""
    for key, timeline in second.timelines.items():
        own = first.timelines.get(key)
        if own is None:
            own = first.timelines[key] = Timeline(device=timeline.device)
        if first.iteration is not None:
            own.reach(first.iteration)
        own.continue_with(timeline)
    first.stray.continue_with(second.stray)
    first.iteration = first.iteration if second.iteration is None else second.iteration
    first.unread.add(second.unread)
    first.bytes_read += second.bytes_read
    first.problems += second.problems
