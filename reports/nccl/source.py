"""Where log bytes come from: files, folders, standard input, pipes, gzip and zstd."""

from __future__ import annotations

import os
import re
import select
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from bench.errors import UsageError
from reports.nccl.blocks import BLOCK_BYTES
from reports.nccl.compression import StoppedError, compression_of, decompressed

MOST_FILES: Final = 100_000
PIPE_PATIENCE_SECONDS: Final = 10.0
_SNIFFED_BYTES: Final = 4096
_NUMBERS: Final = re.compile(r"(\d+)")
_TEXT: Final = bytes({7, 8, 9, 10, 11, 12, 13, 27} | set(range(32, 256)))
_MOST_BINARY: Final = 0.3


@dataclass(frozen=True)
class Source:
    """One stream. size_bytes: of the file as it lies there, None if unknown (a pipe).

    packed: gzip or zstd, "" for plain text, None if it is not known before it is read.
    """

    name: str
    path: Path | None
    size_bytes: int | None
    packed: str | None

    @property
    def can_be_cut(self) -> bool:
        """Whether a worker can start reading in the middle."""
        return self.packed == "" and self.path is not None


def find_sources(paths: Sequence[str | Path]) -> tuple[list[Source], list[str]]:
    """The streams behind `paths`, folders searched in depth, and remarks about what was left out.

    Raises:
        UsageError: a path that does not exist, cannot be read, or is a device.
    """
    found: dict[str, Source] = {}
    remarks: list[str] = []
    for path in paths:
        if str(path) == "-":
            found.setdefault("-", Source("standard input", None, None, None))
            continue
        for source in _sources_of(Path(path), remarks):
            found.setdefault(str(source.path), source)
    return list(found.values()), remarks


def _sources_of(path: Path, remarks: list[str]) -> Iterator[Source]:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            yield from _in_folder(path, remarks)
        elif stat.S_ISREG(status.st_mode):
            yield Source(str(path), path, status.st_size, compression_of(_start_of(path)))
        elif stat.S_ISFIFO(status.st_mode) or _is_stdin(path):
            yield Source(str(path), path, None, None)
        else:
            raise UsageError(
                f"{path} is a device; expected a log file, a folder of them, a pipe or '-'"
            )
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}; expected a log file, a folder of them, a"
            " pipe or '-' for standard input"
        ) from error


def _is_stdin(path: Path) -> bool:
    return str(path) in ("/dev/stdin", "/dev/fd/0", "/dev/null")


def _in_folder(folder: Path, remarks: list[str]) -> Iterator[Source]:
    count = binary = 0
    for base, folders, names in os.walk(folder):
        folders[:] = sorted((f for f in folders if not f.startswith(".")), key=_natural)
        for name in sorted((n for n in names if not n.startswith(".")), key=_natural):
            path = Path(base) / name
            try:
                status = path.stat()
                if not stat.S_ISREG(status.st_mode):
                    continue
                start = _start_of(path)
            except OSError as error:
                remarks.append(f"{path} was left out: {error.strerror}")
                continue
            count += 1
            if count > MOST_FILES:
                remarks.append(f"{folder} holds more than {MOST_FILES} files; the rest is left out")
                return
            packed = compression_of(start)
            if not packed and _looks_binary(start):
                binary += 1
                continue
            yield Source(str(path), path, status.st_size, packed)
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


def read_blocks(source: Source, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The bytes of a source, decompressed; of a plain file only those of [start, end).

    Raises:
        StoppedError: reading ended before the end of the data, with the reason in words.
    """
    try:
        with _opened(source) as stream:
            if source.can_be_cut:
                yield from _range(stream, start, end)
                return
            first = _read(stream)
            packed = compression_of(first)
            if not packed:
                while first:
                    yield first
                    first = _read(stream)
                return
            yield from decompressed(packed, first, stream, source.size_bytes)
    except OSError as error:
        raise StoppedError(f"reading stopped: {error.strerror or error}") from error


def _range(stream: BinaryIO, start: int, end: int | None) -> Iterator[bytes]:
    stream.seek(start)
    left = None if end is None else end - start
    while left is None or left > 0:
        block = stream.read(BLOCK_BYTES if left is None else min(left, BLOCK_BYTES))
        if not block:
            return
        left = None if left is None else left - len(block)
        yield block


def _read(stream: BinaryIO) -> bytes:
    return stream.read(BLOCK_BYTES) or b""


def _opened(source: Source) -> BinaryIO:
    if source.path is None:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=BLOCK_BYTES)
    if source.size_bytes is not None:
        return source.path.open("rb", buffering=0)
    return _opened_pipe(source.path)


def _opened_pipe(path: Path) -> BinaryIO:
    """Open a pipe without waiting for ever for someone to write into it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    stream = os.fdopen(descriptor, "rb", buffering=BLOCK_BYTES)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if not poller.poll(PIPE_PATIENCE_SECONDS * 1e3):
        stream.close()
        raise StoppedError(f"nobody wrote into this pipe for {PIPE_PATIENCE_SECONDS:.0f} s")
    os.set_blocking(descriptor, True)
    return stream
