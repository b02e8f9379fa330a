"""Properties over all logs: interleaving, cutting, noise."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nccl_lines import audit, coll, info, init, reg, ring, sym
from reports.nccl.audit import audit_paths
from reports.nccl.calls import Views
from reports.nccl.verdicts import Audit, Verdict

QUICK = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def facts(audit: Audit) -> list[tuple[object, ...]]:
    """Everything that a verdict consists of."""
    return [
        (
            row.communicator,
            row.operation,
            row.size_bytes,
            row.phase,
            row.verdict,
            dict(row.calls),
            row.processes,
            row.reason and (row.reason.condition, row.reason.text, row.reason.missing),
        )
        for row in audit.rows
    ]


def rank_log(rank: int, random_: random.Random, version: str) -> list[str]:
    """One rank of a job with a communicator of all ranks, and calls of several kinds."""
    comm = f"0x{0xA0 + rank:x}"
    lines = [f"NCCL version {version}+cuda12.9", *init(rank, comm, ranks=4)[:2]]
    state = random.Random(random_.random())  # the same calls on every rank: seeded by the caller
    for step in range(12):
        operation = state.choice(["AllGather", "ReduceScatter", "AllReduce"])
        count = state.choice([1024, 2048, 4096])
        if step == 6:
            lines.append(reg(comm))
        group = state.choice([1, 1, 2])
        lines += [
            coll(operation, comm, count, op=state.choice([0, 0, 4]), ranks=4, recv="0x7f0000100000")
            for _ in range(group)
        ]
        symmetric, of_2_27 = step > 6 and state.random() < 0.7, version.startswith("2.27")
        told = ring(operation, 2 * count, "LL")
        if symmetric:
            told = sym(operation, f"{operation}_LL", 2 * count, None if of_2_27 else 1)
        # Symmetric lines of 2.27 come from every rank, all others from rank 0.
        lines += [told] * group * (rank == 0 or (symmetric and of_2_27))
    return [info(line, rank, f"node{rank // 4}") for line in lines]


def job_logs(seed: int, version: str) -> list[list[str]]:
    return [rank_log(rank, random.Random(seed), version) for rank in range(4)]


def interleaved(logs: list[list[str]], random_: random.Random) -> list[str]:
    """One log, the order within each rank kept."""
    left = [list(reversed(log)) for log in logs]
    merged = []
    while any(left):
        log = random_.choice([one for one in left if one])
        merged.append(log.pop())
    return merged


@QUICK
@given(seed=st.integers(0, 10**6), version=st.sampled_from(["2.27.5", "2.28.3", "2.30.3"]))
def test_any_interleaving_by_process_gives_the_same_verdicts(tmp_path, seed, version):
    logs = job_logs(seed, version)
    folder = tmp_path / f"apart{seed}{version}"
    folder.mkdir(exist_ok=True)
    for rank, log in enumerate(logs):
        (folder / f"rank{rank}.log").write_text("\n".join(log) + "\n")
    together = tmp_path / "together.log"
    expected = facts(audit_paths([folder]))
    assert {row[4] for row in expected} >= {Verdict.REGULAR}
    for shuffle in range(2):
        lines = interleaved(logs, random.Random(seed + shuffle))
        together.write_text("\n".join(lines) + "\n")
        assert facts(audit_paths([together])) == expected


WORDS = st.sampled_from(
    [
        b"node1:12:13 [0] NCCL INFO ",
        b"node1:12:13 [0] f.cc:12 NCCL WARN ",
        b"AllGather: ",
        b"AllGather [Symmetric]: ",
        b"1024 Bytes -> ",
        b"Algo RING proto ",
        b"Kernel AllGather_ST nchannels ",
        b"channel{Lo..Hi}={0..",
        b"opCount 1 sendbuff 0x1 recvbuff 0x2 count 4 datatype 9 op 0 root 0 comm 0x3 ",
        b"[nranks=8] stream 0x4",
        b"comm 0x3 rank 0 nranks 8 cudaDev 0 busId 1 commId 0x5 - Init COMPLETE",
        b"register comm 0x3 buffer 0x1 size 99",
        b"NCCL version 2.27.3",
        b"NCCL_WIN_ENABLE set by environment to 0.",
        b"iteration        1/     100 |",
        b"\x1b[31m",
        b"\r",
        b"\n",
        b"\0",
        b"\xff",
        b"99999999999999999999",
        b'"',
        b" [repeated 3x across cluster]",
    ]
)


@settings(QUICK, max_examples=200)
@given(st.lists(st.one_of(WORDS, st.binary(max_size=12)), max_size=40))
def test_no_input_makes_it_fail(tmp_path, pieces):
    path = tmp_path / "noise"
    path.write_bytes(b"".join(pieces))
    for row in audit_paths([path]).rows:
        assert row.verdict is Verdict.NO_EVIDENCE or row.quote


@QUICK
@given(st.integers(1, 79))
def test_a_line_cut_anywhere_gives_no_verdict(tmp_path, kept):
    head = "n1:1:2 [0] NCCL INFO AllReduce: 1048576 Bytes"
    line = f"{head} -> Algo RING proto SIMPLE channel{{Lo..Hi}}={{0..23}}"
    path = tmp_path / "cut"
    path.write_text(line[: len(line) - 80 + kept])
    assert audit_paths([path]).rows == ()


def test_a_split_communicator_of_2_32_has_the_id_that_stands_before_its_parent(tmp_path):
    # Several ranks on one GPU log the same device: the process and the rank tell them apart.
    lines = [
        f"node1:{1000 + rank}:{1500 + rank} [0] NCCL INFO ncclCommSplit comm 0xbb rank {rank}"
        " nranks 2 cudaDev 0 nvmlDev 0 busId 1b000 commId 0xfeed parent 0xaa childCount 1"
        " color 3 key 0 - Init COMPLETE"
        for rank in (0, 1)
    ]
    found = []
    for name, process in sorted(audit(tmp_path, *lines).job.processes.items()):
        views = Views(name)
        for item in process.items:
            views.take(item)
        found += [(view.comm_id, view.rank, view.ranks, view.split) for view in views.all]
    assert found == [("0xfeed", 0, 2, None), ("0xfeed", 1, 2, None)]


def test_a_line_belongs_to_its_communicator_also_where_its_id_is_told_later(tmp_path):
    # The log begins while the communicator is made: its id stands in the line that completes it.
    head = "node1:1000:1500 [0] NCCL INFO "
    lines = [
        "comm 0xaa rank 0 nRanks 8 nNodes 1 localRanks 8 localRank 0 MNNVL 0",
        "AllGather: 1048576 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}",
        "comm 0xaa rank 0 nranks 8 cudaDev 0 busId 1b000 commId 0xfeed - Init COMPLETE",
    ]
    [row] = audit(tmp_path, *(head + line for line in lines)).rows
    assert (row.communicator.label, row.communicator.ranks) == ("commId 0xfeed", 8)
