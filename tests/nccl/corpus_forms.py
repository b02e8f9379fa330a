"""Cases by decoration and by damage."""

from __future__ import annotations

import gzip

from corpus_lines import MIB, case, coll, info, job, ring, sym

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
