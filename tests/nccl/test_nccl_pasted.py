"""Lines without the prefix of their rank, evidence of an unknown process, and lines of nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from nccl_lines import audit, coll, info, init, reg, ring, sym
from reports.nccl.presentation import audit_blocks, communicator_text, reading_facts
from reports.nccl.verdicts import Verdict
from reports.renderers.render import render

KERNEL = "AllReduce [Symmetric]: 2097152 Bytes -> Kernel AllReduce_RSxLDMC_AGxSTMC nchannels 16"


@pytest.mark.parametrize(
    ("line", "verdict", "kernel"),
    [
        (f"{KERNEL} nthreads 512 nWorks 1", Verdict.SYMMETRIC, "AllReduce_RSxLDMC_AGxSTMC"),
        (f"{KERNEL} ...", Verdict.SYMMETRIC, "AllReduce_RSxLDMC_AGxSTMC"),
        (
            "NCCL INFO AlltoAll [Copy Engine]: 8388608 Bytes -> cudaMemcpy",
            Verdict.COPY_ENGINE,
            "cudaMemcpy",
        ),
        ("AllReduce: 4096 Bytes -> Algo RING proto LL ...", Verdict.REGULAR, "RING LL"),
        (
            "> `AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}`",
            Verdict.REGULAR,
            "RING LL",
        ),
    ],
)
def test_a_pasted_line_is_judged_as_one_of_an_unknown_process(tmp_path, line, verdict, kernel):
    found = audit(tmp_path, line)
    [row] = found.rows
    assert (row.verdict, row.kernels, row.processes) == (verdict, (kernel,), ("unknown process",))
    assert found.job.unread.damaged == 0
    assert not found.job.hosts
    text = render(audit_blocks(found))
    assert "1 line without the prefix HOST:PID:TID is evidence of an unknown process" in text
    assert "which one printed them is unknown" in " ".join(row.remarks)
    assert "an unknown process" in reading_facts(found)[0]
    assert "number in brackets" not in text, "there is none"


def test_the_same_pasted_line_twice_is_at_least_one_call_where_every_rank_prints_it(tmp_path):
    line = sym("AllGather", "AllGather_ST")
    [row] = audit(tmp_path, line, line).rows
    assert (row.lines, dict(row.calls), row.at_least) == (2, {Verdict.SYMMETRIC: 1}, True)


def test_pasted_lines_beside_those_of_a_known_process_are_told_apart(tmp_path):
    found = audit(tmp_path, info(ring("AllReduce")), ring("AllGather"))
    printed = {row.operation: row.processes for row in found.rows}
    assert printed == {"AllReduce": ("node1:1000 [0]",), "AllGather": ("unknown process",)}
    assert found.job.hosts == {"node1"}


@pytest.mark.parametrize(
    "lines",
    [
        # The end of an AllReduce, whose beginning is lost.
        (info(ring("AllGather")), ring("Reduce")),
        # A log with damage: the line may be a piece of one that another rank cut in two.
        (info(ring("AllGather")), info(ring("AllReduce"))[:60], ring("AllReduce")),
    ],
)
def test_in_a_log_what_may_be_the_end_of_another_line_is_damage(tmp_path, lines):
    found = audit(tmp_path, *lines)
    assert [row.operation for row in found.rows] == ["AllGather"]
    assert found.job.unread.damaged == len(lines) - 1


@pytest.mark.parametrize(
    "line",
    [
        "Widgets: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}",
        "4096 Bytes -> Algo 1 proto 0 time 7.5",
        "AllGather: 4096 Bytes -> Algo RING",  # the tail of a log, which nobody has cut on purpose
        "AllGather [Symmetric]: is nice",
        "00:100 [0] NCCL INFO AllGather: 4096 Bytes -> Algo RING proto LL",  # its host is lost
        *(
            f"{cut}NCCL INFO {ring('AllGather')}"
            for cut in ("0] ", "[0", "] ", "e1:100:200 ", "200 [0] ", ":100:200 [0] ")
        ),
    ],
)
def test_what_is_no_fragment_of_a_line_or_lacks_some_of_its_prefix_is_damage(tmp_path, line):
    found = audit(tmp_path, line)
    assert (found.rows, found.job.unread.damaged) == ((), 1)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("NCCL INFO ReduceScatter [Symmetric]: ...", "ReduceScatter unknown SYMMETRIC "),
        ("ReduceScatter [Symmetric]: \N{HORIZONTAL ELLIPSIS}", "ReduceScatter unknown SYMMETRIC "),
        ("ReduceScatter [Symmetric]: [...]", "ReduceScatter unknown SYMMETRIC "),
        ("[3] NCCL INFO AllGather: ...", "AllGather unknown NO_EVIDENCE "),
        ("NCCL INFO AlltoAll [Copy Engine]: ...", "AlltoAll unknown COPY_ENGINE "),
        ("AllReduce: 4096 Bytes ...", None),
        ("AllReduce: 4096 Bytes -> ...", "AllReduce 4096 REGULAR "),
        ("AllReduce: 4096 Bytes -> Algo RI...", "AllReduce 4096 REGULAR "),
        (
            "NCCL INFO AllReduce: 64 Bytes -> Algo RING proto LL chan",
            "AllReduce 64 REGULAR RING LL",
        ),
        (
            "AllReduce [Symmetric]: 4096 Bytes -> Kernel AllReduce_RSx...",
            "AllReduce 4096 SYMMETRIC ",
        ),
        (
            "NCCL INFO ReduceScatter [Symmetric]: 100681728 Bytes -> Kernel ReduceScatter_LDMC"
            " nchannels 2 nthreads ",
            "ReduceScatter 100681728 SYMMETRIC ReduceScatter_LDMC",
        ),
    ],
)
def test_a_fragment_has_the_verdict_that_is_left_of_it(tmp_path, line, shown):
    found = audit(tmp_path, line)
    assert found.job.unread.damaged == 0
    rows = [
        f"{row.operation} {row.size_bytes if row.bytes_are == 'per_rank' else row.bytes_are}"
        f" {row.verdict} {'/'.join(row.kernels)}"
        for row in found.rows
    ]
    assert rows == ([] if shown is None else [shown])
    assert ("bytes cut off" in render(audit_blocks(found))) == any(
        row.reason is not None and row.bytes_are == "unknown" for row in found.rows
    )


def test_fragments_in_a_log_of_processes_are_damage(tmp_path):
    found = audit(tmp_path, info(ring("AllReduce")), "NCCL INFO AllGather [Symmetric]: ...")
    assert ([row.operation for row in found.rows], found.job.unread.damaged) == (["AllReduce"], 1)


DECORATIONS = ("", "I0622 10:11:12.000001 1 nccl_utils.cc:77] ", "2026-08-11T10:00:20Z ", "[7] ")


@pytest.mark.parametrize("before", [*DECORATIONS[:-1], "[rank0]: ", "(Worker pid=5) ", "10:11:12 "])
def test_lines_without_even_the_device_are_those_of_one_unknown_process(tmp_path, before):
    [row] = audit(tmp_path, f"{before}NCCL INFO {ring('AllGather')}").rows
    assert (row.verdict, row.processes) == (Verdict.REGULAR, ("unknown process",))


@pytest.mark.parametrize("before", DECORATIONS)
def test_a_log_whose_prefixes_are_cut_to_the_device_is_judged_with_its_communicators(
    tmp_path, before
):
    said = [
        *((rank, text) for rank in (0, 1) for text in init(rank, comm=f"0xa{rank}", ranks=2)),
        *((rank, reg(comm=f"0xa{rank}")) for rank in (0, 1)),
        (0, coll("AllGather", comm="0xa0", ranks=2)),
        (0, sym("AllGather", "AllGather_STMC", works=1)),
    ]
    lines = [f"{before}[{rank}] NCCL INFO {text}" for rank, text in said]
    found = audit(tmp_path, "NCCL version 2.29.7+cuda13.0", *lines)
    [row] = found.rows
    assert (row.verdict, row.size_bytes, row.phase) == (Verdict.SYMMETRIC, 1 << 20, "after")
    assert (row.communicator.ranks, row.processes) == (2, ("unknown process [0]",))
    assert (found.job.unread.damaged, found.versions) == (0, ("2.29.7",))
    remark = (
        f"{len(lines)} lines without the prefix HOST:PID:TID are evidence of an unknown process"
    )
    assert any(remark in text for text in found.job.remarks)


@pytest.mark.parametrize(
    ("hosts", "nodes", "says"),
    [
        (("n1", "n2"), 2, "(2 ranks, 2 nodes, n1, n2)"),
        (("n1",), 2, "(2 ranks, 2 nodes, seen on n1)"),
        (("n1", "n1"), 1, "(2 ranks, 1 node)"),
    ],
)
def test_nodes_are_named(tmp_path: Path, hosts: tuple[str, ...], nodes: int, says: str) -> None:
    lines = [
        info(text, rank, host)
        for rank, host in enumerate(hosts)
        for text in (
            *init(rank, ranks=2, nodes=nodes),
            coll("AllGather", ranks=2),
            ring("AllGather"),
        )
    ]
    assert communicator_text(audit(tmp_path, *lines).rows[0].communicator).endswith(says)
