"""Lines without the prefix of their rank, evidence of an unknown process, and lines of nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from nccl_lines import coll, info, init, ring, sym
from reports.nccl.audit import audit_paths
from reports.nccl.presentation import communicator_text, reading_facts, to_terminal
from reports.nccl.rows import Verdict

KERNEL = "AllReduce [Symmetric]: 2097152 Bytes -> Kernel AllReduce_RSxLDMC_AGxSTMC nchannels 16"


def audit(tmp_path, *lines):
    path = tmp_path / "pasted.txt"
    path.write_text("\n".join(lines) + "\n")
    return audit_paths([path])


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
    text = to_terminal(found)
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
        "NCCL INFO AlltoAll [Copy Engine]: ...",
        "AllReduce: 4096 Bytes -> Algo RI...",
        "AllReduce [Symmetric]: 4096 Bytes -> Kernel AllReduce_RSx...",
        "Widgets: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}",
        "4096 Bytes -> Algo 1 proto 0 time 7.5",
    ],
)
def test_what_is_left_out_is_not_guessed(tmp_path, line):
    found = audit(tmp_path, line)
    assert (found.rows, found.job.unread.damaged) == ((), 1)


def log(folder: Path, *hosts: str, nodes: int) -> None:
    lines = []
    for rank, host in enumerate(hosts):
        said = [*init(rank, ranks=2, nodes=nodes), coll("AllGather", ranks=2), ring("AllGather")]
        lines += [info(text, rank, host) for text in said]
    (folder / "job.log").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("hosts", "nodes", "says"),
    [
        (("n1", "n2"), 2, "(2 ranks, 2 nodes, n1, n2)"),
        (("n1",), 2, "(2 ranks, 2 nodes, seen on n1)"),
        (("n1", "n1"), 1, "(2 ranks, 1 node)"),
    ],
)
def test_nodes_are_named(tmp_path: Path, hosts: tuple[str, ...], nodes: int, says: str) -> None:
    log(tmp_path, *hosts, nodes=nodes)
    audit = audit_paths([tmp_path])
    assert communicator_text(audit.rows[0].communicator).endswith(says)
