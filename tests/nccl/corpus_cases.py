"""The synthetic corpus: logs by version, subsystems, decorations and damage, and what they prove.

Each case's expectations were written from the specification of the lines before the parser was run
on it: `OPERATION BYTES PHASE VERDICT [condition=NAME] [missing=A,B]`, one per expected row, `-` for
no phase. `python tests/nccl/corpus_cases.py` writes the files again.
"""

from __future__ import annotations

import gzip
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


# --- versions, TUNING alone -------------------------------------------------------------------
case(
    "v220_tuning",
    [info(f"{MIB * 8} Bytes -> Algo 1 proto 2 time 123.450000")],
    f"(operation not printed) {MIB * 8} - REGULAR condition=version",
)
case(
    "v223_tuning",
    [info(f"AllGather: {MIB * 8} Bytes -> Algo 1 proto 2 time 12.500000")],
    f"AllGather {MIB * 8} - REGULAR condition=version",
)
case(
    "v223_all_reduce",
    [info(f"AllReduce: {MIB} Bytes -> Algo 4 proto 2 time 12.500000")],
    f"AllReduce {MIB} - REGULAR condition=version",
)
case(
    "v224_tuning",
    ["NCCL version 2.24.3+cuda12.6", info(ring("AllReduce"))],
    f"AllReduce {MIB} - REGULAR condition=version",
)
case(
    "v226_tuning",
    ["NCCL version 2.26.2+cuda12.8", info(ring("ReduceScatter"))],
    f"ReduceScatter {MIB} - REGULAR condition=version",
)
case("v227_symmetric", [info(sym("AllGather", "AllGather_ST"))], f"AllGather {MIB} - SYMMETRIC")
case(
    "v227_every_rank",
    [info(sym("AllGather", "AllGather_ST"), r) for r in range(4)],
    f"AllGather {MIB} - SYMMETRIC",
)
case(
    "v228_symmetric",
    [info(sym("ReduceScatter", "ReduceScatter_LDMC", works=1))],
    f"ReduceScatter {MIB} - SYMMETRIC",
)
case(
    "v228_batched",
    [info(sym("ReduceScatter", "ReduceScatter_LD", 4 * MIB, works=4))],
    f"ReduceScatter {4 * MIB} - SYMMETRIC",
)
case(
    "v229_copy_engine",
    [info(f"AllGather [Copy Engine]: {16 * MIB} Bytes -> cudaMemcpy")],
    f"AllGather {16 * MIB} - COPY_ENGINE condition=copy_engine",
)
case(
    "v229_copy_engine_nvls",
    [
        info(
            f"AllGather [Copy Engine]: {16 * MIB} Bytes -> cudaMemcpy; CE synchronization with NVLS"
        )
    ],
    f"AllGather {16 * MIB} - COPY_ENGINE condition=copy_engine",
)
case(
    "v2307_hierarchical",
    [info(f"AllGather [Hierarchical CE]: {16 * MIB} Bytes -> RMA proxy + CE")],
    f"AllGather {16 * MIB} - HIERARCHICAL_CE condition=copy_engine",
)
case(
    "rccl_copy_engine",
    [info(f"AllGather [Copy Engine]: {MIB} Bytes -> hipMemcpyBatchAsync, numOps=7")],
    f"AllGather {MIB} - COPY_ENGINE condition=copy_engine",
)
case(
    "v230_gin",
    job(
        sym("ReduceScatter", "ReduceScatter_RailA2A_LsaLD", works=1),
        version="2.30.3",
        nodes=2,
        ranks=16,
    ),
    f"ReduceScatter {MIB} - SYMMETRIC",
)
case(
    "unknown_kernel",
    [info(sym("AllReduce", "AllReduce_Future_XY", works=1))],
    f"AllReduce {MIB} - SYMMETRIC",
)
case(
    "kernel_unknown_word",
    [info(sym("AllReduce", "Unknown", works=1))],
    f"AllReduce {MIB} - SYMMETRIC",
)
case(
    "v219_nothing",
    job(coll("AllGather"), version="2.19.4"),
    f"AllGather {MIB} - NO_EVIDENCE condition=version",
)
case(
    "lower_case_names",
    [info(f"AllReduce: {MIB} Bytes -> Algo Ring proto Simple channel{{Lo..Hi}}={{0..1}}")],
    f"AllReduce {MIB} - REGULAR missing=ENV,COLL,REG",
)
case(
    "both_kinds_unknown_comm",
    [info(ring("AllReduce")), info(sym("AllReduce", "AllReduce_AGxLL_R", works=1))],
    f"AllReduce {MIB} - MIXED missing=COLL,REG",
)

# --- reasons, with COLL and INIT --------------------------------------------------------------
case(
    "why_average",
    job(reg(), coll("ReduceScatter", op=4), ring("ReduceScatter")),
    f"ReduceScatter {MIB} after REGULAR condition=reduction",
)
case(
    "why_average_2303",
    job(reg(), coll("ReduceScatter", op=4, recv="0x100"), ring("ReduceScatter"), version="2.30.3"),
    f"ReduceScatter {MIB} after REGULAR missing=ENV,ALLOC",
)
case(
    "why_premul",
    job(reg(), coll("ReduceScatter", op=5), ring("ReduceScatter"), version="2.30.7"),
    f"ReduceScatter {MIB} after REGULAR condition=reduction",
)
case(
    "why_max",
    job(coll("AllReduce", op=2), ring("AllReduce")),
    f"AllReduce {MIB} - REGULAR condition=reduction",
)
case(
    "why_float64",
    job(coll("AllReduce", count=MIB // 8, dtype=8), ring("AllReduce")),
    f"AllReduce {MIB} - REGULAR condition=data_type",
)
case(
    "why_int32",
    job(coll("AllReduce", count=MIB // 4, dtype=2), ring("AllReduce")),
    f"AllReduce {MIB} - REGULAR condition=data_type",
)
case(
    "gather_int_needs_reg",
    job(coll("AllGather", count=MIB // 4, dtype=2), ring("AllGather")),
    f"AllGather {MIB} - REGULAR missing=ENV,REG",
)
case(
    "why_nodes_228",
    job(coll("AllGather", ranks=16), ring("AllGather"), nodes=2, ranks=16),
    f"AllGather {MIB} - REGULAR condition=spans_nodes",
)
case(
    "why_nodes_all_reduce_230",
    job(coll("AllReduce", ranks=16), ring("AllReduce"), version="2.30.3", nodes=2, ranks=16),
    f"AllReduce {MIB} - REGULAR condition=spans_nodes",
)
case(
    "why_nodes_scatter_2293",
    job(
        coll("ReduceScatter", ranks=16), ring("ReduceScatter"), version="2.29.3", nodes=2, ranks=16
    ),
    f"ReduceScatter {MIB} - REGULAR condition=spans_nodes",
)
case(
    "nodes_gather_230_not_the_reason",
    job(coll("AllGather", ranks=16), ring("AllGather"), version="2.30.3", nodes=2, ranks=16),
    f"AllGather {MIB} - REGULAR missing=ENV,REG",
)
case(
    "why_too_old",
    job(coll("AllGather"), ring("AllGather"), version="2.26.5"),
    f"AllGather {MIB} - REGULAR condition=version",
)
case(
    "why_broadcast",
    job(coll("Broadcast"), ring("Broadcast"), version="2.30.3"),
    f"Broadcast {MIB} - REGULAR condition=operation",
)
case(
    "why_grouped_227",
    job(
        reg(size=1 << 40),
        coll("AllGather"),
        coll("AllGather", count=HALF // 2),
        ring("AllGather"),
        ring("AllGather", MIB // 2),
        version="2.27.3",
    ),
    f"AllGather {MIB // 2} after REGULAR condition=grouped",
    f"AllGather {MIB} after REGULAR condition=grouped",
)
case(
    "why_grouped_227_window",
    job(
        "IPC symmetric alloc buffer 0x7f00 size 99",
        reg(size=1 << 40),
        coll("AllGather"),
        coll("AllGather", count=HALF // 2),
        ring("AllGather"),
        ring("AllGather", MIB // 2),
        version="2.27.3",
    ),
    f"AllGather {MIB // 2} after REGULAR condition=grouped",
    f"AllGather {MIB} after REGULAR condition=grouped",
)
case(
    "grouped_228_is_no_reason",
    job(
        "Inserted window 0x1 into address map, ret=0",
        reg(size=1 << 40),
        coll("AllGather"),
        coll("AllGather", count=HALF // 2),
        ring("AllGather"),
        ring("AllGather", MIB // 2),
        version="2.29.7",
    ),
    f"AllGather {MIB // 2} after REGULAR missing=ENV",
    f"AllGather {MIB} after REGULAR missing=ENV",
)
case(
    "why_other_comm_registered",
    job(reg("0xbb"), coll("AllGather"), ring("AllGather")),
    f"AllGather {MIB} - REGULAR condition=registration",
)
case(
    "why_outside",
    job(reg(), coll("AllGather", send="0x1000", recv="0x2000"), ring("AllGather")),
    f"AllGather {MIB} after REGULAR condition=registration",
)
case(
    "why_send_outside_227",
    job(reg(), coll("AllGather", send="0x1000"), ring("AllGather"), version="2.27.5"),
    f"AllGather {MIB} after REGULAR condition=registration",
)
case(
    "gather_recv_is_enough_229",
    job(reg(), coll("AllGather", send="0x1000"), ring("AllGather"), version="2.29.7"),
    f"AllGather {MIB} after REGULAR missing=ENV,ALLOC",
)
case(
    "before_and_after",
    job(
        coll("AllGather"),
        ring("AllGather"),
        reg(),
        coll("AllGather"),
        sym("AllGather", "AllGather_STMC", works=1),
    ),
    f"AllGather {MIB} before REGULAR condition=registration",
    f"AllGather {MIB} after SYMMETRIC",
)
case(
    "mixed_after",
    job(
        reg(),
        coll("AllGather"),
        sym("AllGather", "AllGather_STMC", works=1),
        coll("AllGather", send="0x10", recv="0x20"),
        ring("AllGather"),
    ),
    f"AllGather {MIB} after MIXED condition=registration",
)
case(
    "why_win_disabled",
    job("NCCL_WIN_ENABLE set by environment to 0.", coll("AllGather"), ring("AllGather")),
    f"AllGather {MIB} - REGULAR condition=switched_off",
)
case(
    "why_cumem_disabled",
    job("NCCL_CUMEM_ENABLE set by environment to 0.", coll("AllGather"), ring("AllGather")),
    f"AllGather {MIB} - REGULAR condition=switched_off",
)
case(
    "why_not_supported",
    [
        *[info(m) for m in ("NCCL version 2.29.3+cuda13.0", *init(0)[:2])],
        info("Symmetric memory is not supported. cuMemEnable 0, ginSupport 0, globalNicFused 0"),
        info(init(0)[2]),
        info(coll("AllGather")),
        info(ring("AllGather")),
    ],
    f"AllGather {MIB} - REGULAR condition=spans_nodes",
)
case(
    "why_p2p",
    [
        *[info(m) for m in ("NCCL version 2.27.3+cuda12.9", *init(0)[:2])],
        info("Check P2P Type isAllDirectP2p 0 directMode 0"),
        info(init(0)[2]),
        info(coll("AllGather")),
        info(ring("AllGather")),
    ],
    f"AllGather {MIB} - REGULAR condition=spans_nodes",
)
case(
    "why_override",
    job(
        "NCCL_SYM_KERNEL set by environment to AllGather_ST",
        "Inserted window 0x1 into address map, ret=0",
        reg(),
        coll("AllReduce"),
        ring("AllReduce"),
        version="2.29.7",
    ),
    f"AllReduce {MIB} after REGULAR condition=override",
)
case(
    "why_size",
    job(
        "NCCL_DEBUG set by environment to INFO",
        "Inserted window 0x1 into address map, ret=0",
        reg(size=1 << 50),
        coll("AllGather", count=1 << 32),
        ring("AllGather", 1 << 33),
        version="2.30.3",
    ),
    f"AllGather {1 << 33} after REGULAR condition=size",
)
case(
    "eligible",
    job(
        "NCCL_DEBUG set by environment to INFO",
        "Inserted window 0x1 into address map, ret=0",
        reg(),
        coll("AllReduce"),
        ring("AllReduce"),
        version="2.30.3",
    ),
    f"AllReduce {MIB} after REGULAR",
)
case(
    "copy_engine_policy",
    job(
        "Comm config CTA policy flags set to 2",
        coll("AllGather"),
        f"AllGather [Copy Engine]: {MIB} Bytes -> cudaMemcpy",
        version="2.29.2",
    ),
    f"AllGather {MIB} - COPY_ENGINE condition=copy_engine",
)
case(
    "v223_total_bytes_with_ranks",
    job(
        coll("AllGather"),
        f"AllGather: {8 * MIB} Bytes -> Algo 1 proto 2 time 1.500000",
        version="2.23.4",
    ),
    f"AllGather {MIB} - REGULAR condition=version",
)
case(
    "v222_operation_from_call",
    job(
        coll("ReduceScatter"), f"{8 * MIB} Bytes -> Algo 1 proto 2 time 1.500000", version="2.22.3"
    ),
    f"ReduceScatter {MIB} - REGULAR condition=version",
)
case(
    "batched_with_calls",
    job(
        reg(),
        coll("ReduceScatter"),
        coll("ReduceScatter", count=2 * HALF),
        sym("ReduceScatter", "ReduceScatter_LD", 3 * MIB, works=2),
    ),
    f"ReduceScatter {MIB} after SYMMETRIC",
    f"ReduceScatter {2 * MIB} after SYMMETRIC",
)

# --- who prints -------------------------------------------------------------------------------
case(
    "rank1_calls_alone",
    job(coll("AllGather"), coll("AllGather"), rank=1),
    f"AllGather {MIB} - NO_EVIDENCE",
)
case(
    "ranks_joined_by_id",
    [*job(coll("AllGather"), ring("AllGather")), *job(coll("AllGather"), rank=1)],
    f"AllGather {MIB} - REGULAR missing=ENV,REG",
)
case(
    "copy_engine_228_silent",
    job(
        "Init CE, rank 0 baseUCSymReadyPtr 0x1, baseUCSymComplPtr 0x2, seq num 1",
        coll("AllGather"),
        version="2.28.7",
    ),
    f"AllGather {MIB} - NO_EVIDENCE",
)
case("empty_and_single_calls", job(coll("AllGather", count=0), coll("AllReduce", ranks=1)))
case("only_init", job())
case(
    "pointer_reused",
    job(
        coll("AllGather"),
        ring("AllGather"),
        "comm 0xaa rank 0 nranks 8 cudaDev 0 busId 1b000 - Destroy COMPLETE",
        *init(0, ident="0xbeef"),
        coll("AllGather"),
        sym("AllGather", "AllGather_STMC", works=1),
    ),
    f"AllGather {MIB} - REGULAR missing=REG",
    f"AllGather {MIB} - SYMMETRIC",
)
case(
    "two_comms_same_size",
    job(
        *init(0, "0xbb", 2, ident="0xf00"),
        coll("AllReduce"),
        ring("AllReduce"),
        coll("AllReduce", "0xbb", ranks=2),
        sym("AllReduce", "AllReduce_AGxLL_R", works=1),
    ),
    f"AllReduce {MIB} - REGULAR missing=REG",
    f"AllReduce {MIB} - SYMMETRIC",
)
case(
    "p2p_alltoall_has_no_line",
    job(coll("Send"), coll("Recv")),
    f"Send {MIB} - NO_EVIDENCE",
    f"Recv {MIB} - NO_EVIDENCE",
)

# --- decorations ------------------------------------------------------------------------------
_AG = sym("AllGather", "AllGather_STMC", works=1)
_DECORATED = {
    "torchrun_rank": "[rank3]:{}",
    "torchrun_default": "[default0]:{}",
    "srun_label": " 0: {}",
    "srun_torchrun": "8:[default0]:{}",
    "openmpi_tag": "[1,2]<stdout>:{}",
    "ray": "(RayWorkerWrapper pid=581, ip=10.0.0.3) {}",
    "ray_ansi": "\x1b[36m(RayWorkerWrapper pid=581)\x1b[0m {}",
    "ray_ansi_broken": "\ufffd[36m(RayWorkerWrapper pid=581)\ufffd[0m {}",
    "ray_repeated": "(Worker pid=5) {} [repeated 15x across cluster]",
    "pod": "[pod/train-0/pytorch] {}",
    "kubectl_time": "2026-02-27T21:28:39.433296123Z stdout F {}",
    "docker_json": '{{"log":"{}\\n","stream":"stdout","time":"2026-02-27T21:28:39Z"}}',
    "json_escaped": '{{"log":"\\u001b[36m{}\\u001b[0m\\n","stream":"stderr"}}',
    "quoted": "`{}`",
    "tagged": "{} | job=train",
    "nccl_time": "[2026-02-27 21:28:39] {}",
    "nccl_time_glued": "[21:28:39.123]{}",
    "crlf": "{}\r",
    "progress_bar": "50%|#####     | 5/10\r{}",
    "trailing_colour": "{}\x1b[0m",
}
case(
    "deco_json_arrow",
    ['{"log":"' + info(ring("AllReduce")).replace(">", "\\u003e") + '\\n"}'],
    f"AllReduce {MIB} - REGULAR missing=ENV,COLL,REG",
)
for _name, _form in _DECORATED.items():
    case(f"deco_{_name}", [_form.format(info(_AG))], f"AllGather {MIB} - SYMMETRIC")
case(
    "deco_invalid_utf8",
    b"\xff\xfe\x80 rank " + info(_AG).encode() + b"\n",
    f"AllGather {MIB} - SYMMETRIC",
)
case("deco_nul", b"\0" * 500 + info(_AG).encode() + b"\n", f"AllGather {MIB} - SYMMETRIC")
case(
    "deco_gzip.gz",
    gzip.compress((info(_AG) + "\n").encode(), mtime=0),
    f"AllGather {MIB} - SYMMETRIC",
)

# --- damage -----------------------------------------------------------------------------------
case("cut_in_channels", [info(ring("AllReduce"))[:-4]], damaged=True)
case("cut_in_kernel", [info(sym("AllGather", "AllGather_ST"))[:-30]], damaged=True)
case("cut_call", [info(coll("AllGather"))[:-40]], damaged=True)
case(
    "glued_complete",
    [info(ring("AllReduce")) + info(_AG, 1)],
    f"AllReduce {MIB} - REGULAR missing=COLL,REG",
    f"AllGather {MIB} - SYMMETRIC",
)
case(
    "glued_cut",
    [info(_AG), info(_AG, 1), info(ring("AllReduce"))[:-9] + info(_AG, 1)],
    f"AllGather {MIB} - SYMMETRIC",
    damaged=True,
)
case(
    "headless_tail",
    ["Algo RING proto SIMPLE channel{Lo..Hi}={0..23}", "AllGather: 1024 Bytes -> Algo RING"],
    damaged=True,
)
case(
    "tuning_table",
    [
        info("  Algorithm   |            Tree           |            Ring"),
        "    AllGather |  0  0  1 |",
        info("    AllReduce |    8.4/   3.0 |   12.1/  24.0 |"),
    ],
)
case(
    "rail_model_lines",
    job(
        "ReduceScatter_RailA2A_LsaLD : satblocks=16 bufsize=4096 effbw=12.5",
        version="2.29.7",
        nodes=2,
        ranks=16,
    ),
)
case(
    "prose",
    ["The AllGather took 12 Bytes -> hm", "NCCL is fine", "reduce [Symmetric]: is nice"],
    damaged=True,
)
case("zero_works", [info(sym("AllGather", "AllGather_ST", works=0))], damaged=True)
case(
    "huge_number",
    [info(f"AllGather: {'9' * 19} Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..0}}")],
    damaged=True,
)
case("empty", b"")


def write(folder: Path = CORPUS) -> None:
    folder.mkdir(exist_ok=True)
    for one in CASES:
        (folder / file_name(one)).write_bytes(one.data)
    table = ["# file\texpected rows, from the specification\tdamage is counted"]
    table += [
        f"{file_name(c)}\t{'; '.join(c.expected) or '(no row)'}\t{'yes' if c.damaged else 'no'}"
        for c in CASES
    ]
    (folder / "EXPECTED.tsv").write_text("\n".join(table) + "\n")


def file_name(one: Case) -> str:
    return one.name if one.name.endswith(".gz") else f"{one.name}.txt"


if __name__ == "__main__":
    write()
