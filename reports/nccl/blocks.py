"""From a stream of bytes to blocks of whole lines, in bounded memory whatever the stream holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from reports.nccl.slow_lines import LONGEST_LINE_BYTES

BLOCK_BYTES: Final = 1 << 20


def whole_lines(blocks: Iterable[bytes], skipped: Callable[[], None]) -> Iterator[bytes]:
    """Blocks that end at line ends; `skipped` is called for each line too long to be kept.

    NUL bytes, which a truncated or sparse file is full of, are dropped. Where a very long line has
    carriage returns (progress bars), those end its lines.
    """
    rest = b""
    skipping = False
    for raw in blocks:
        block = raw.translate(None, b"\0") if b"\0" in raw else raw
        cut = block.rfind(b"\n")
        if cut < 0 and len(rest) + len(block) > LONGEST_LINE_BYTES and b"\r" in block:
            block = block.replace(b"\r", b"\n")
            cut = block.rfind(b"\n")
        if cut < 0:
            rest += block
            if skipping or len(rest) > LONGEST_LINE_BYTES:
                if not skipping:
                    skipped()
                skipping, rest = True, b""
            continue
        start = block.index(b"\n") + 1 if skipping else 0
        if start <= cut:
            yield rest + block[start : cut + 1]
        rest, skipping = block[cut + 1 :], False
    if rest:
        yield rest


def split_at(blocks: Iterable[bytes], offsets: list[int]) -> Iterator[tuple[bytes, int]]:
    """The blocks cut at `offsets` (ascending); with each piece, how many offsets lie before it."""
    position = passed = 0
    for block in blocks:
        start = 0
        while passed < len(offsets) and offsets[passed] <= position + len(block):
            cut = max(start, offsets[passed] - position)
            if cut > start:
                yield block[start:cut], passed
            start = cut
            passed += 1
        if start < len(block):
            yield block[start:], passed
        position += len(block)
