"""Where log lines come from: files, folders, standard input, pipes, gzip and zstd."""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from bench.errors import UsageError

LONGEST_LINE_BYTES: Final = 64 * 1024


_MAGIC: Final = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_LONGEST_MAGIC: Final = 4
_LARGEST_WINDOW_BYTES: Final = 128 << 20


class StoppedError(Exception):
    """Reading of one source ended early; what was read before counts."""


def compression_of(start: bytes) -> str:
    """`gzip`, `zstd` or "" by the first bytes."""
    return next((name for magic, name in _MAGIC if start.startswith(magic)), "")


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
    sources: dict[str, LogSource] = {}
    remarks: list[str] = []
    for path in paths:
        if str(path) == "-":
            sources.setdefault("-", LogSource("standard input", None))
            continue
        for source in _sources_of(Path(path), remarks):
            sources.setdefault(str(source.path), source)
    return list(sources.values()), remarks


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
    return len(visible.translate(None, _TEXT)) > _MOST_BINARY * max(len(visible), 1)


def read_lines(source: LogSource) -> Iterator[bytes]:
    """The lines of a source, decompressed, with their ends; long ones come in pieces.

    Raises:
        StoppedError: reading ended before the end of the data, with the reason in words.
    """
    packed = ""
    try:
        path = source.path
        with path.open("rb") if path else os.fdopen(os.dup(sys.stdin.fileno()), "rb") as stream:
            packed = compression_of(stream.peek(_LONGEST_MAGIC))
            unpacked = _unpacked(packed, stream)
            while line := unpacked.readline(LONGEST_LINE_BYTES):
                yield line
    except _damage(packed) as error:
        raise StoppedError(f"the {packed} data is damaged or cut off ({error})") from error
    except OSError as error:
        raise StoppedError(f"reading stopped: {error.strerror or error}") from error


def _unpacked(packed: str, stream: BinaryIO) -> BinaryIO:
    if packed == "gzip":
        return gzip.GzipFile(fileobj=stream)  # type: ignore[return-value]
    if not packed:
        return stream
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES)
    return io.BufferedReader(unpacker.stream_reader(stream, read_across_frames=True))


def _damage(packed: str) -> tuple[type[Exception], ...]:
    """What reading raises where compressed data is damaged."""
    if packed == "zstd":
        import zstandard

        return (zstandard.ZstdError,)
    return EOFError, zlib.error, gzip.BadGzipFile
