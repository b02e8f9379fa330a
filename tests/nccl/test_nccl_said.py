"""What NCCL says beside kernels and calls: refused windows, the copy engine, RAS, the Inspector."""

from __future__ import annotations

import json

import pytest

from bench.cli.nccl import NcclVerb
from nccl_lines import MIB, audit, coll, info, init, reg, ring, sym
from reports.nccl import inspector
from reports.nccl.presentation import audit_blocks, reading_facts, to_data
from reports.nccl.verdicts import Verdict
from reports.renderers.render import render

NO_SPACE = "Allocation failed. No suitable space found to accommodate size=0x20 within limit=0x10"
CHECK = "Coll AllReduce size {} symmetric registration check failed on rank 1: sendReg 1 recvReg 0"


def warn(message: str, rank: int = 0) -> str:
    pid = 1000 + rank
    return f"node1:{pid}:{pid + 500} [{rank}] allocator.cc:229 (space) NCCL WARN {message}"


def begun(*lines: str) -> list[str]:
    return [info("NCCL version 2.30.7+cuda13.0"), *map(info, init(0)), *lines]


CALLED = [info(coll("AllReduce")), info(ring("AllReduce", algorithm="NVLS"))]


@pytest.mark.parametrize(
    "refusal",
    [
        NO_SPACE,
        "Window address must be suitably aligned.",
        "Window registration of addresses that span multiple physical segments is not supported.",
        "buffer 0x1 (baseAddr 0x1 align 2) size 3 (baseSize 4 align 5) does not satisfy symmetric"
        " registration requirements",
    ],
)
def test_a_refused_window_is_the_reason_and_its_line_the_proof(tmp_path, refusal):
    found = audit(tmp_path, *begun(info(reg()), warn(refusal), *CALLED))
    [row] = found.rows
    assert (row.verdict, row.reason.condition) == (Verdict.REGULAR, "registration")
    assert row.reason.text == "a window was refused on this communicator"
    assert row.reason.quote == warn(refusal)[:240]


def test_a_refused_window_beside_one_that_stands_is_no_reason_for_buffers_inside_of_that(tmp_path):
    other = info(reg(start="0x1000", size=4096))
    held = [info(reg()), info("Inserted window 0x1 into address map, ret=0")]
    found = audit(tmp_path, *begun(*held, other, warn(NO_SPACE), *CALLED))
    [row] = found.rows
    assert "refused" not in row.reason.text
    assert any(NO_SPACE in text for text in reading_facts(found))
    # Those of the refused one are not registered.
    far = {"send": "0x1000", "recv": "0x1800"}
    calls = [info(coll("AllReduce", count=64, **far)), info(ring("AllReduce", 128))]
    [row] = audit(tmp_path, *begun(*held, other, warn(NO_SPACE), *calls)).rows
    assert row.reason.text == "a window was refused on this communicator"


def test_a_refusal_that_names_no_communicator_may_be_the_reason_and_is_quoted(tmp_path):
    lines = ["[0] NCCL INFO NCCL version 2.30.7+cuda13.0"]
    lines += [f"[0] nccl/src/allocator.cc:229 (ncclSpaceAlloc) NCCL WARN {NO_SPACE}"]
    lines += [f"[0] NCCL INFO {ring('AllReduce', algorithm='NVLS')}"]
    [row] = audit(tmp_path, *lines).rows
    assert (row.verdict, row.reason.condition) == (Verdict.REGULAR, "")
    assert any(NO_SPACE in text for text in row.reason.candidates)
    assert {"COLL", "REG"} <= {*row.reason.missing}


def test_the_check_of_registrations_proves_it_for_calls_of_its_size(tmp_path):
    lines = begun(info(reg()), warn(CHECK.format(MIB)), *CALLED)
    [row] = audit(tmp_path, *lines).rows
    assert row.reason.condition == "registration"
    assert row.reason.quote == warn(CHECK.format(MIB))
    [row] = audit(tmp_path, *(one.replace(f"size {MIB} ", "size 64 ") for one in lines)).rows
    assert row.reason.condition == ""
    assert any("size 64 symmetric" in text for text in row.reason.candidates)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("shared_gpu", warn("Multiple Ranks are using the same GPU/Partition. Set X=1")),
        ("mismatch", warn("Mismatched NCCL version detected : rank 0 22907 rank 1 23003")),
        ("nvls", info("NVLS multicast support is not available on dev 0")),
        ("nvls", info("NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)")),
        ("nvls_failed", info("Failed to bind NVLink SHARP (NVLS) Multicast memory of size 1")),
        ("gin", info("Assigned GIN plugin GIN_IB_GDAKI to comm")),
        ("gin", info("GIN/Plugin: Could not find: libnccl-gin.so")),
        ("window_refused", warn(NO_SPACE)),
        ("offsets", warn(CHECK.format(1))),
    ],
)
def test_every_line_of_these_kinds_is_quoted_under_reading_once(tmp_path, kind, line):
    other = line.replace("node1:1000:1500 [0]", "node1:1001:1501 [1]")
    found = audit(tmp_path, *begun(line, line, other, *CALLED))
    quotes = [text for text in reading_facts(found) if line in text]
    assert len(quotes) == 1
    assert quotes[0].endswith(" (and 1 other processes)")
    (data,) = to_data(found)["said"]
    assert (data["kind"], data["line"], data["other_processes"]) == (kind, line, 1)


@pytest.mark.parametrize(
    "asked",
    [
        "Comm config CTA policy flags set to 2",
        "NCCL_CTA_POLICY set by environment to 2.",
        "NCCL_CTA_POLICY set by environment to ZERO",
    ],
)
def test_a_copy_engine_that_is_asked_for_and_not_taken_is_said(tmp_path, asked):
    calls = [info(coll("AllGather")), info(ring("AllGather"))]
    found = audit(tmp_path, *begun(info(asked), *calls, *CALLED))
    reasons = {row.operation: row.reason.text for row in found.rows}
    assert "the copy engine was requested and not taken" in reasons["AllGather"]
    assert "copy engine" not in reasons["AllReduce"]  # which it cannot do
    said = f"the copy engine was requested, and not taken by AllGather: {info(asked)}"
    assert said in reading_facts(found)
    calls[1] = info("AllGather [Copy Engine]: 1048576 Bytes -> cudaMemcpy")
    assert "not taken" not in render(audit_blocks(audit(tmp_path, *begun(info(asked), *calls))))
    calls[1] = info(sym("AllGather", "AllGather_ST", works=1))
    assert said in reading_facts(audit(tmp_path, *begun(info(asked), *calls)))


def record(
    time: float, *, bytes_: int = 2048, header: bool = True, ranks: int = 8, **more: object
) -> dict:
    perf = {"coll": "AllReduce", **more, "coll_sn": 1, "coll_msg_size_bytes": bytes_}
    perf |= {"coll_exec_time_us": time, "coll_algobw_gbs": 1.0, "coll_busbw_gbs": 1.75}
    head = {
        "header": {"id": "0x7f", "rank": 2, "n_ranks": ranks, "nnodes": 1},
        "metadata": {"pid": 1},
    }
    return {**(head if header else {}), "coll_perf": perf}


@pytest.mark.parametrize("indent", [None, 2])
def test_times_of_the_inspector_are_read_per_collective_size_and_ranks(tmp_path, indent):
    records = [record(time) for time in (400, 300, 350.5)] + [record(9, bytes_=64, ranks=4)]
    texts = [json.dumps(one, indent=indent) for one in records]
    found = audit(tmp_path, *texts)
    assert [
        (row.size_bytes, row.ranks, row.records, row.median, row.least, row.most)
        for row in found.job.times.rows()
    ] == [(64, 4, 1, 9, 9, 9), (2048, 8, 3, 350.5, 300, 400)]
    assert (found.rows, found.job.unread.damaged) == ((), 0)
    assert "Times per collective (NCCL Inspector)" in render(audit_blocks(found))
    assert to_data(found)["inspector"][1] == {
        "operation": "AllReduce", "size_bytes": 2048, "ranks": 8, "kernel": "", "records": 3,
        "median": 350.5, "least": 300.0, "most": 400.0, "bus_bandwidth": 1.75,
    }  # fmt: skip
    assert NcclVerb(logs=(str(tmp_path / "log"),)).run().code == 0


def test_records_behind_a_marker_have_its_ranks_and_their_algorithm(tmp_path):
    marker = {"header": {"rank": 0, "n_ranks": 4}, "dump_stats": {"coll_dropped_total": 0}}
    bodies = [record(n, header=False, coll_algo="RING", coll_proto="LL") for n in (10, 20)]
    (row,) = audit(tmp_path, *map(json.dumps, (marker, *bodies))).job.times.rows()
    assert (row.ranks, row.kernel, row.records, row.median) == (4, "RING LL", 2, 15)


def test_a_record_without_a_time_or_with_none_is_left_out(tmp_path):
    bad = [record("soon"), record(-1), {"coll_perf": {"coll": "AllReduce"}}]
    assert audit(tmp_path, *map(json.dumps, bad)).job.times.rows() == []


def test_records_of_more_kinds_than_are_kept_are_counted_aloud(tmp_path, monkeypatch):
    monkeypatch.setattr(inspector, "_MOST_KEYS", 1)
    texts = [json.dumps(record(9, bytes_=size)) for size in (64, 128, 256)]
    job = audit(tmp_path, *texts).job
    assert [row.size_bytes for row in job.times.rows()] == [64]
    assert "2 records of more kinds of NCCL Inspector were not kept" in job.remarks


@pytest.mark.parametrize(
    "report",
    [
        "Job summary\n===========\n\nCommunicators... (0.00s)\n=============\n",
        '{\n  "nccl_version": "2.29.1",\n  "communicators_count": 1,\n  "communicators": []\n}',
    ],
)
def test_a_report_of_ras_is_called_by_its_name_and_is_no_evidence(tmp_path, report):
    found = audit(tmp_path, report)
    assert "a report of NCCL RAS (ncclras)" in " ".join(found.job.remarks)
    assert NcclVerb(logs=(str(tmp_path / "log"),)).run().code == 3
