"""Where log bytes come from: files, folders, standard input, pipes, gzip and zstd.

Streams become blocks of whole lines, in bounded memory whatever they hold.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from bench.errors import UsageError

BLOCK_BYTES: Final = 1 << 20
LONGEST_LINE_BYTES: Final = 64 * 1024


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


_MAGIC: Final = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_LONGEST_MAGIC: Final = 4
_LARGEST_WINDOW_BYTES: Final = 128 << 20


class StoppedError(Exception):
    """Reading of one source ended early; what was read before counts."""


def compression_of(start: bytes) -> str:
    """`gzip`, `zstd` or "" by the first bytes."""
    return next((name for magic, name in _MAGIC if start.startswith(magic)), "")


def _decompressed(packed: str, stream: BinaryIO) -> Iterator[bytes]:
    """The blocks behind a compressed stream.

    Raises:
        StoppedError: damaged or cut data.
    """
    reader, damaged = _unpacker(packed, stream)
    try:
        while block := reader.read1(BLOCK_BYTES):
            yield block
    except damaged as error:
        raise StoppedError(f"the {packed} data is damaged or cut off ({error})") from error


def _unpacker(packed: str, stream: BinaryIO) -> tuple[Any, tuple[type[Exception], ...]]:
    """A reader of what the stream holds, and what it raises where the data is damaged."""
    if packed == "gzip":
        return gzip.GzipFile(fileobj=stream), (EOFError, zlib.error, gzip.BadGzipFile)
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES)
    return unpacker.stream_reader(stream, read_across_frames=True), (zstandard.ZstdError,)


MOST_FILES: Final = 100_000
_SNIFFED_BYTES: Final = 4096
_NUMBERS: Final = re.compile(r"(\d+)")
_TEXT: Final = bytes({7, 8, 9, 10, 11, 12, 13, 27} | set(range(32, 256)))
_MOST_BINARY: Final = 0.3
_STANDARD_INPUT: Final = ("/dev/stdin", "/dev/fd/0", "/dev/null")


@dataclass(frozen=True)
class LogSource:
    """One stream. path: None for standard input."""

    name: str
    path: Path | None


def find_sources(paths: Sequence[str | Path]) -> tuple[list[LogSource], list[str]]:
    """The streams behind `paths`, folders searched in depth, and remarks about what was left out.

    Raises:
        UsageError: a path that does not exist, cannot be read, or is a device.
    """
    found: dict[str, LogSource] = {}
    remarks: list[str] = []
    for path in paths:
        if str(path) == "-":
            found.setdefault("-", LogSource("standard input", None))
            continue
        for source in _sources_of(Path(path), remarks):
            found.setdefault(str(source.path), source)
    return list(found.values()), remarks


def _sources_of(path: Path, remarks: list[str]) -> Iterator[LogSource]:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            yield from _in_folder(path, remarks)
        elif stat.S_ISREG(status.st_mode):
            _start_of(path)
            yield LogSource(str(path), path)
        elif stat.S_ISFIFO(status.st_mode) or str(path) in _STANDARD_INPUT:
            yield LogSource(str(path), path)
        else:
            raise UsageError(
                f"{path} is a device; expected a log file, a folder of them, a pipe or '-'"
            )
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}; expected a log file, a folder of them, a"
            " pipe or '-' for standard input"
        ) from error


def _in_folder(folder: Path, remarks: list[str]) -> Iterator[LogSource]:
    count = binary = 0
    for base, folders, names in os.walk(folder):
        folders[:] = sorted((f for f in folders if not f.startswith(".")), key=_natural)
        for name in sorted((n for n in names if not n.startswith(".")), key=_natural):
            path = Path(base) / name
            try:
                if not stat.S_ISREG(path.stat().st_mode):
                    continue
                start = _start_of(path)
            except OSError as error:
                remarks.append(f"{path} was left out: {error.strerror}")
                continue
            count += 1
            if count > MOST_FILES:
                remarks.append(f"{folder} holds more than {MOST_FILES} files; the rest is left out")
                return
            if not compression_of(start) and _looks_binary(start):
                binary += 1
                continue
            yield LogSource(str(path), path)
    if binary:
        remarks.append(f"{folder}: {binary} binary file{'s' * (binary > 1)} left out")
    if not count:
        remarks.append(f"{folder} holds no file")


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts rank10 behind rank9."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in _NUMBERS.split(name)]


def _start_of(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(_SNIFFED_BYTES)


def _looks_binary(start: bytes) -> bool:
    # NUL alone is what a truncated log starts with, so it does not count as binary.
    visible = start.replace(b"\0", b"")
    control = len(visible) - sum(visible.count(byte) for byte in set(visible) & set(_TEXT))
    return control > _MOST_BINARY * max(len(visible), 1)


def read_blocks(source: LogSource) -> Iterator[bytes]:
    """The bytes of a source, decompressed.

    Raises:
        StoppedError: reading ended before the end of the data, with the reason in words.
    """
    try:
        with _opened(source) as stream:
            packed = compression_of(stream.peek(_LONGEST_MAGIC))
            if packed:
                yield from _decompressed(packed, stream)
            else:
                while block := stream.read(BLOCK_BYTES):
                    yield block
    except OSError as error:
        raise StoppedError(f"reading stopped: {error.strerror or error}") from error


def _opened(source: LogSource) -> io.BufferedReader:
    if source.path is None:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    return source.path.open("rb")
