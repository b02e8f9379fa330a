"""Speed of the NCCL audit on two long logs.

    python -m tools.nccl_reading            generate both, measure, remove them
    python -m tools.nccl_reading write KIND LINES PATH

Both logs have two million lines of 3 operations, 3 sizes and 64 hosts with 8 processes each: TUNING
lines only (about 235 MB), or every other line a COLL line with its own counter and one of 64 pairs
of buffers per process.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LINES: Final = 2_000_000
_OPERATIONS: Final = ("AllGather", "ReduceScatter", "AllReduce")
_ELEMENTS: Final = (65_732_608, 27_267_072, 65_736_704)
_ALL: Final = "{0..23}"
_KINDS: Final = ("tuning", "calls")


def write_log(path: Path, kind: str, lines: int, *, seed: int = 0) -> None:
    """Write a log of `kind` ("tuning" or "calls") with `lines` lines."""
    random_ = random.Random(seed)
    make = _tuning_lines if kind == "tuning" else _call_lines
    with path.open("w") as stream:
        batch: list[str] = []
        for index, line in enumerate(make(random_)):
            if index >= lines:
                break
            batch.append(line)
            if len(batch) == 10_000:  # noqa: PLR2004 - lines per write
                stream.write("".join(batch))
                batch.clear()
        stream.write("".join(batch))


def _head(random_: random.Random) -> tuple[int, str]:
    host, device = random_.randrange(64), random_.randrange(8)
    process = host * 8 + device
    return process, f"worker-{host:04d}:{2730515 + device}:{2731900 + device} [{device}] NCCL INFO "


def _choice(operation: str, size_bytes: int) -> str:
    if operation == "AllGather":
        return (
            f"AllGather [Symmetric]: {size_bytes} Bytes -> Kernel AllGather_STMC nchannels 9"
            " nthreads 512 nWorks 1\n"
        )
    return (
        f"{operation}: {size_bytes} Bytes -> Algo RING proto SIMPLE channel{{Lo..Hi}}={{0..23}}\n"
    )


def _tuning_lines(random_: random.Random) -> Iterator[str]:
    while True:
        _, head = _head(random_)
        operation = random_.choice(_OPERATIONS)
        yield head + _choice(operation, 2 * random_.choice(_ELEMENTS))


def _call_lines(random_: random.Random) -> Iterator[str]:
    counters: dict[int, int] = {}
    while True:
        process, head = _head(random_)
        counter = counters[process] = counters.get(process, 0) + 1
        operation, count = random_.choice(_OPERATIONS), random_.choice(_ELEMENTS)
        buffer = 0x7F0000000000 + (process << 32) + (random_.randrange(64) << 24)
        yield (
            f"{head}{operation}: opCount {counter:x} sendbuff {buffer:#x} recvbuff"
            f" {buffer + 4096:#x} count {count} datatype 9 op 0 root 0 comm"
            f" {0x55550000 + process:#x} [nranks=64] stream 0x5566\n"
        )
        yield head + _choice(operation, 2 * count)


def seconds(log: Path) -> tuple[float, float]:
    """Wall and processor time of the audit of a log, the better of two."""
    found = []
    for _ in range(2):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [sys.executable, "-m", "bench", "nccl", str(log)]
        subprocess.run(command, capture_output=True, check=True)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        found.append((wall, used))
    return min(found)


def main(arguments: list[str]) -> int:
    """Measure, or write one log."""
    if arguments[:1] == ["write"]:
        kind, lines, path = arguments[1:]
        write_log(Path(path), kind, int(lines))
        return 0
    print(f"NCCL audit, {LINES:,} lines, warm cache, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        for kind in _KINDS:
            log = Path(folder) / f"{kind}.log"
            write_log(log, kind, LINES)
            wall, used = seconds(log)
            size = log.stat().st_size / 1e6
            print(f"{kind}: {size:.0f} MB, {wall:.2f} s wall, {used:.2f} s processor")
            log.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
