"""The lines that the corpus is made of, and how a case states what they prove."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
MIB = 1 << 20
HALF = 524288  # elements of bfloat16 in 1 MiB


@dataclass(frozen=True)
class Case:
    name: str
    data: bytes
    expected: tuple[str, ...]
    damaged: bool = False


CASES: list[Case] = []


def case(name: str, lines: Iterable[str] | bytes, *expected: str, damaged: bool = False) -> None:
    data = lines if isinstance(lines, bytes) else ("\n".join(lines) + "\n").encode()
    CASES.append(Case(name, data, expected, damaged))


def info(message: str, rank: int = 0, host: str = "node1", tid: int = 0) -> str:
    pid = 1000 + rank
    return f"{host}:{pid}:{tid or pid + 500} [{rank}] NCCL INFO {message}"


def ring(operation: str, size: int = MIB, proto: str = "SIMPLE") -> str:
    return f"{operation}: {size} Bytes -> Algo RING proto {proto} channel{{Lo..Hi}}={{0..23}}"


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


def job(
    *messages: str, rank: int = 0, version: str = "2.28.3", nodes: int = 1, ranks: int = 8
) -> list[str]:
    """One process: version, its communicator, then the messages."""
    start = [f"NCCL version {version}+cuda12.9", *init(rank, ranks=ranks, nodes=nodes)]
    return [info(m, rank) for m in (*start, *messages)]
