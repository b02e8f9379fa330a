"""Long NCCL logs, drawn: what `tools.own_costs` lets the audit read.

Lines are of 3 operations, 3 sizes and 64 hosts with 8 processes each: TUNING lines only, or every
other line a COLL line with its own counter and one of 64 pairs of buffers per process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

_OPERATIONS: Final = ("AllGather", "ReduceScatter", "AllReduce")
_ELEMENTS: Final = (65_732_608, 27_267_072, 65_736_704)
KINDS: Final = ("tuning", "calls")


def write_log(path: Path, kind: str, lines: int) -> None:
    """Write a log of `kind` ("tuning" or "calls") with `lines` lines."""
    random_ = random.Random(0)
    make = _tuning_lines if kind == "tuning" else _call_lines
    with path.open("w") as stream:
        stream.writelines(islice(make(random_), lines))


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
