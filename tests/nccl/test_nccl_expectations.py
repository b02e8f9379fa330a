"""What a run asked of NCCL and what its log proves: in a row's words, and in the headline."""

from __future__ import annotations

import json

import pytest

from bench.resolve.resolution import resolve_anywhere
from bench.spec import RunSpec
from reports.nccl.audit import audit_run
from reports.nccl.expectations import shortfalls, verdict_text

HEAD = "n1:10:20 [0] NCCL INFO "
COMM = "comm 0xa0 rank 0 nranks 2 cudaDev 0 busId 1b commId 0xc - Init COMPLETE"
UB = {"nccl_ub": True, "double_buffer": True, "allocator": "fixed_pool"}


def call(operation, size=256):
    return (
        f"{operation}: opCount 1 sendbuff 0x1 recvbuff 0x2 count {size // 4} datatype 7 op 0 root 0"
        " comm 0xa0 [nranks=2] stream 0x5"
    )


def regular(operation, algorithm="RING", size=256):
    return f"{operation}: {size} Bytes -> Algo {algorithm} proto SIMPLE channel{{Lo..Hi}}={{0..1}}"


def symmetric(operation, kernel, size=256):
    kernel = f"Kernel {operation}_{kernel} nchannels 1 nthreads 512 nWorks 1"
    return f"{operation} [Symmetric]: {size} Bytes -> {kernel}"


def copy_engine(operation, size=256):
    return f"{operation} [Copy Engine]: {size} Bytes -> cudaMemcpy"


def audit(tmp_path, gathers, reductions, version="2.29.3"):
    """Of a log in which every gather and every reduction is told by the given lines."""
    nccl = tmp_path / "nccl"
    nccl.mkdir(parents=True)
    spec = {"launch": {"device": "cuda"}, "measure": {"nccl": "evidence"}}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    lines = [f"NCCL version {version}+cuda13.0", COMM]
    for operation, told in (("AllGather", gathers), ("ReduceScatter", reductions)):
        for line in told:
            size = int(line.split(" Bytes")[0].split()[-1]) if " Bytes" in line else 256
            lines += [call(operation, size), line]
    (nccl / "rank0.log").write_text("".join(f"{HEAD}{line}\n" for line in lines))
    found = audit_run(tmp_path).audit
    assert found is not None
    return found


def resolved(*, engine=None, **launch):
    return resolve_anywhere(
        RunSpec.model_validate(
            {"engine": engine or {}, "launch": {"device": "cuda", "ranks": 2, **launch}}
        )
    )


SYMMETRIC = ([symmetric("AllGather", "ST")], [symmetric("ReduceScatter", "LD")])
REGULAR = ([regular("AllGather")], [regular("ReduceScatter")])


def test_a_run_that_asked_for_nothing_lacks_nothing(tmp_path):
    found = audit(tmp_path, *REGULAR)
    assert shortfalls(resolved(), found) == []
    assert shortfalls(resolved(), None) == []
    assert verdict_text(resolved(), found) == "AllGather REGULAR; ReduceScatter REGULAR"


def test_symmetric_kernels_that_ran_are_no_shortfall(tmp_path):
    found = audit(tmp_path, *SYMMETRIC)
    assert shortfalls(resolved(engine=UB), found) == []
    assert verdict_text(resolved(), found) == "AllGather SYMMETRIC; ReduceScatter SYMMETRIC"


def test_regular_kernels_where_symmetric_ones_were_asked_for_are_named(tmp_path):
    found = audit(tmp_path, SYMMETRIC[0], REGULAR[1])
    (text,) = shortfalls(resolved(engine=UB), found)
    assert text.startswith(
        "asked for symmetric kernels and did not get them: ReduceScatter REGULAR"
    )
    assert "AllGather" not in text
    plain = resolved(engine=UB | {"symmetric_registration": False})
    assert shortfalls(plain, found) == []


def test_a_part_of_the_bytes_is_told_as_a_share(tmp_path):
    gathers = [symmetric("AllGather", "ST", 300), regular("AllGather", size=100)]
    found = audit(tmp_path, gathers, [])
    assert verdict_text(resolved(), found) == "AllGather 25 % REGULAR, 75 % SYMMETRIC"


def test_without_a_log_nothing_is_proved():
    (text,) = shortfalls(resolved(engine=UB), None)
    assert "no log tells" in text
    assert "measure.nccl: evidence" in text


def test_the_copy_engine_is_asked_for_gathers_and_proved_by_its_own_line(tmp_path):
    asked = resolved(engine=UB, copy_engine=True)
    told = audit(tmp_path / "a", [copy_engine("AllGather")], SYMMETRIC[1])
    assert shortfalls(asked, told) == []
    kernels = audit(tmp_path / "b", *SYMMETRIC)
    (text,) = shortfalls(asked, kernels)
    assert text.startswith("asked for copy-engine gathers and did not get them: AllGather SYMM")


def test_nccl_2_28_prints_no_line_for_the_copy_engine_which_proves_nothing(tmp_path):
    silent = audit(tmp_path, ["some other line"], SYMMETRIC[1], version="2.28.9")
    (text,) = shortfalls(resolved(engine=UB, copy_engine=True), silent)
    assert "copy-engine gathers" in text


@pytest.mark.parametrize(
    ("gathers", "reductions", "is_met"),
    [
        ([regular("AllGather", "NVLS")], [regular("ReduceScatter", "NVLS")], True),
        ([symmetric("AllGather", "STMC")], [symmetric("ReduceScatter", "LDMC")], True),
        ([regular("AllGather", "NVLS")], [regular("ReduceScatter")], False),
        (*SYMMETRIC, False),
    ],
)
def test_nvls_is_proved_by_its_algorithm_or_by_multicast(tmp_path, gathers, reductions, is_met):
    found = shortfalls(resolved(nvls="on"), audit(tmp_path, gathers, reductions))
    assert (found == []) == is_met
    assert shortfalls(resolved(nvls="off"), audit(tmp_path / "off", gathers, reductions)) == []


def test_collnet_is_proved_by_its_algorithm(tmp_path):
    told = ([regular("AllGather", "COLLNET_DIRECT")], [regular("ReduceScatter", "COLLNET_CHAIN")])
    assert shortfalls(resolved(collnet="on"), audit(tmp_path / "a", *told)) == []
    (text,) = shortfalls(resolved(collnet="on"), audit(tmp_path / "b", *REGULAR))
    assert text.startswith("asked for CollNet (SHARP) and did not get them: AllGather REGULAR")
