"""gzip and zstd, in bounded memory, with an end to what only unpacks and never says anything."""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

from reports.nccl.blocks import BLOCK_BYTES

# A compressed file that has unpacked to this much without one NCCL line is given up if it also
# shrank a hundredfold, which text with anything in it does not.
SILENT_BYTES: Final = 256 << 20
SUSPECT_RATIO: Final = 100
MOST_BYTES: Final = 64 << 30

_MAGIC: Final = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_LARGEST_WINDOW_BYTES: Final = 128 << 20


class StoppedError(Exception):
    """Reading of one source ended early; what was read before counts."""


def compression_of(start: bytes) -> str:
    """`gzip`, `zstd` or "" by the first bytes."""
    return next((name for magic, name in _MAGIC if start.startswith(magic)), "")


class _Joined(io.RawIOBase):
    """Bytes already read, then the rest of a stream; counts what was taken."""

    def __init__(self, first: bytes, rest: BinaryIO) -> None:
        self._first = first
        self._rest = rest
        self.taken_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        wanted = len(buffer)
        if self._first:
            part, self._first = self._first[:wanted], self._first[wanted:]
        else:
            part = self._rest.read(wanted) or b""
        buffer[: len(part)] = part
        self.taken_bytes += len(part)
        return len(part)


def decompressed(
    packed: str, first: bytes, rest: BinaryIO, size_bytes: int | None
) -> Iterator[bytes]:
    """The blocks behind a compressed stream that begins with `first`.

    Raises:
        StoppedError: damaged or cut data, or data that unpacks without end and holds no NCCL line.
    """
    del size_bytes
    joined = _Joined(first, rest)
    total = 0
    silent = True
    blocks = _gunzipped(joined) if packed == "gzip" else _unzstd(joined)
    try:
        for block in blocks:
            total += len(block)
            silent = silent and b" NCCL " not in block and b"NCCL version" not in block
            yield block
            if silent and total > max(SILENT_BYTES, SUSPECT_RATIO * joined.taken_bytes):
                raise StoppedError(
                    f"{joined.taken_bytes:,} bytes unpacked to {total:,} without one NCCL line:"
                    " this looks like a decompression bomb and was given up"
                )
            if total > MOST_BYTES:
                raise StoppedError(
                    f"unpacked to more than {MOST_BYTES >> 30} GiB; the rest is left out"
                )
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise StoppedError(f"the {packed} data is damaged or cut off ({error})") from error


def _gunzipped(stream: io.RawIOBase) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=io.BufferedReader(stream, BLOCK_BYTES)) as unpacked:
        while block := unpacked.read1(BLOCK_BYTES):
            yield block


def _unzstd(stream: io.RawIOBase) -> Iterator[bytes]:
    """By the module if it is installed, else by the program `zstd`."""
    try:
        import zstandard
    except ImportError:
        yield from _by_program(stream)
        return
    unpacker = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES)
    reader = unpacker.stream_reader(io.BufferedReader(stream, BLOCK_BYTES), read_across_frames=True)
    try:
        while block := reader.read(BLOCK_BYTES):
            yield block
    except zstandard.ZstdError as error:
        raise StoppedError(f"the zstd data is damaged or cut off ({error})") from error


def _by_program(stream: io.RawIOBase) -> Iterator[bytes]:
    program = shutil.which("zstd")
    if program is None:
        raise StoppedError(
            "reading zstd needs the Python package zstandard or the program zstd; found neither"
        )
    import threading

    with subprocess.Popen(
        [program, "-dcq", f"--memory={_LARGEST_WINDOW_BYTES >> 20}MB"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise StoppedError("the program zstd could not be started")
        feeder = threading.Thread(target=_pump, args=(stream, process.stdin), daemon=True)
        feeder.start()
        try:
            while block := process.stdout.read(BLOCK_BYTES):
                yield block
        finally:
            process.kill() if process.poll() is None and feeder.is_alive() else None
        if process.wait() > 0:
            raise StoppedError("the zstd data is damaged or cut off")


def _pump(source: io.RawIOBase, target: Any) -> None:
    try:
        while block := source.read(BLOCK_BYTES):
            target.write(block)
        target.close()
    except (OSError, ValueError):
        return
