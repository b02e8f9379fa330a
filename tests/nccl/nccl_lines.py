"""Lines of NCCL, to make logs of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.resolve.resolution import resolve_anywhere
from bench.spec import ResolvedRun, RunSpec
from reports.nccl.audit import audit_paths
from reports.nccl.verdicts import Audit

MIB = 1 << 20
HALF = 524288  # elements of bfloat16 in 1 MiB


def audit(folder: Path, *lines: str) -> Audit:
    """Of a log with these lines."""
    path = folder / "log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return audit_paths([path])


def on_cuda(launch: dict[str, Any], **sections: dict[str, Any]) -> ResolvedRun:
    """A run on two devices. launch: what replaces or adds to that."""
    document = {"launch": {"device": "cuda", "ranks": 2, **launch}, **sections}
    return resolve_anywhere(RunSpec.model_validate(document))


def info(message: str, rank: int = 0, host: str = "node1", tid: int = 0) -> str:
    pid = 1000 + rank
    return f"{host}:{pid}:{tid or pid + 500} [{rank}] NCCL INFO {message}"


def ring(operation: str, size: int = MIB, proto: str = "SIMPLE", algorithm: str = "RING") -> str:
    what = f"Algo {algorithm} proto {proto} channel{{Lo..Hi}}={{0..23}}"
    return f"{operation}: {size} Bytes -> {what}"


def sym(operation: str, kernel: str, size: int = MIB, works: int | None = None) -> str:
    tail = "" if works is None else f" nWorks {works}"
    return (
        f"{operation} [Symmetric]: {size} Bytes -> Kernel {kernel} nchannels 9 nthreads 512{tail}"
    )


def coll(
    operation: str,
    comm: str = "0xaa",
    count: int = HALF,
    dtype: int = 9,
    op: int = 0,
    ranks: int = 8,
    send: str = "0x7f0000000000",
    recv: str = "0x7f0010000000",
) -> str:
    return (
        f"{operation}: opCount 1f sendbuff {send} recvbuff {recv} count {count} datatype {dtype}"
        f" op {op} root 0 comm {comm} [nranks={ranks}] stream 0x5566"
    )


def init(
    rank: int, comm: str = "0xaa", ranks: int = 8, nodes: int = 1, ident: str = "0xc0ffee"
) -> list[str]:
    start = (
        f"ncclCommInitRankConfig comm {comm} rank {rank} nranks {ranks} cudaDev {rank} nvmlDev"
        f" {rank} busId 1b000 commId {ident} - Init"
    )
    local = ranks // nodes
    return [
        f"{start} START",
        f"comm {comm} rank {rank} nRanks {ranks} nNodes {nodes} localRanks {local} localRank"
        f" {rank % local} MNNVL 0",
        f"{start} COMPLETE",
    ]


def reg(comm: str = "0xaa", start: str = "0x7f0000000000", size: int = 1 << 30) -> str:
    return f"register comm {comm} buffer {start} size {size}"
