"""Cases by version, by reason, and by who prints."""

from __future__ import annotations

from corpus_lines import HALF, MIB, case, coll, info, init, job, reg, ring, sym

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
    "v232_rail",
    [info(f"AllGather [Hierarchical CE]: {16 * MIB} Bytes -> Rail Ring RMA proxy + CE")],
    f"AllGather {16 * MIB} - HIERARCHICAL_CE condition=copy_engine",
)
case(
    "v232_cluster_size",
    [info(ring("AllGather") + " cgaClusterSize 4")],
    f"AllGather {MIB} - REGULAR missing=ENV,COLL,REG",
)
case(
    "v232_not_supported",
    [
        *[info(m) for m in ("NCCL version 2.32.3+cuda13.2", *init(0)[:2])],
        info(
            "symmetricSupport 0, cuMemEnable 1, globalGinSupport 0, cuMemGdrSupport 0,"
            " contiguousRanksPerHost 1, crossNicSupport 0"
        ),
        info(init(0)[2]),
        info(coll("AllGather")),
        info(ring("AllGather")),
    ],
    f"AllGather {MIB} - REGULAR condition=spans_nodes",
)
case(
    "v232_supported",
    [
        *[info(m) for m in ("NCCL version 2.32.3+cuda13.2", *init(0)[:2])],
        info("symmetricSupport 1, cuMemEnable 1, globalGinSupport 0, cuMemGdrSupport 1,"),
        info(init(0)[2]),
        info(reg()),
        info(coll("AllGather")),
        info(sym("AllGather", "AllGather_STMC", works=1)),
    ],
    f"AllGather {MIB} after SYMMETRIC",
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
