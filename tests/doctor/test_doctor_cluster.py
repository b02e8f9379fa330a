"""`doctor --cluster`: what its ranks find out, and what is made of their report."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.cli.diagnosis import show_cluster
from bench.doctor.cluster import Asked, Probe, _job, failure, judged
from bench.doctor.cluster_rank import REPORT, ranks_by_node, rounds_of
from bench.errors import UsageError
from bench.record import RunStatus

ROOT = Path(__file__).resolve().parents[2]


def report(nodes: int = 4, ranks_per_node: int = 2) -> dict[str, Any]:
    """Of a healthy cluster: 80 GB/s within a node, 8 GB/s between nodes."""
    ranks = [
        {
            "rank": rank,
            "node": rank // ranks_per_node,
            "host": f"node-{rank // ranks_per_node}",
            "met_seconds": 1.0 + rank,
            "same": {"torch": "2.13.0", "NCCL": "2.28.3", "devices": ["H100"]},
        }
        for rank in range(nodes * ranks_per_node)
    ]
    firsts = [node * ranks_per_node for node in range(nodes)]
    between = [(a, b) for a in firsts for b in firsts if a < b]
    pairs = [(a, a + 1, 1e-4) for a in firsts] + [(a, b, 1e-3) for a, b in between]
    return {
        "ranks": ranks,
        "clocks": [
            {"rank": first, "offset_seconds": 1e-5 * first, "uncertainty_seconds": 1e-5}
            for first in firsts[1:]
        ],
        "pairs": [
            {"ranks": [a, b], "there_seconds": seconds, "back_seconds": seconds}
            for a, b, seconds in pairs
        ],
        "bytes": 8 * 10**6,
    }


def by_name(found: list[Any]) -> dict[str, Any]:
    return {one.what: one for one in found}


def test_a_healthy_cluster_is_described_without_a_remark() -> None:
    found = by_name(judged(report()))
    assert {one.level for one in found.values()} == {"ok"}
    assert found["rendezvous"].found.startswith("8 ranks met: 2 on node-0, 2 on node-1")
    assert "the slowest took 8.0 s (rank 7 on node-3)" in found["rendezvous"].found
    assert found["bandwidth within nodes"].found.startswith("80.00 GB/s, the median of 4 pairs")
    assert found["bandwidth between nodes"].found.startswith("8.00 GB/s, the median of 6 pairs")


def test_a_node_with_another_version_is_a_problem_that_names_it() -> None:
    document = report()
    for rank in (4, 5):
        document["ranks"][rank]["same"]["NCCL"] = "2.21.5"
    document["ranks"][7]["same"]["LD_PRELOAD"] = "libx.so"
    found = by_name(judged(document))
    assert found["NCCL differs"].level == "problem"
    assert found["NCCL differs"].found == '"2.28.3" on most, "2.21.5" on node-2'
    assert found["LD_PRELOAD differs"].found == 'null on most, "libx.so" on node-3'


@pytest.mark.parametrize(
    ("offset", "unsure", "level"), [(0.2, 1e-4, "note"), (-0.2, 1e-4, "note"), (2e-3, 5e-3, "ok")]
)
def test_a_clock_that_is_off_is_named_unless_it_cannot_be_known(
    offset: float, unsure: float, level: str
) -> None:
    document = report()
    document["clocks"][1] |= {"offset_seconds": offset, "uncertainty_seconds": unsure}
    finding = by_name(judged(document))["clock skew"]
    assert finding.level == level
    assert "node-2 against node-0" in finding.found


def test_a_slow_pair_is_named_with_its_nodes_whichever_way_it_is_slow() -> None:
    document = report()
    slow = next(pair for pair in document["pairs"] if pair["ranks"] == [2, 6])
    slow["back_seconds"] = 4e-3
    found = by_name(judged(document))
    assert found["slow pairs between nodes"].found == (
        "2.00 GB/s (ranks 2 and 6, node-1 and node-3)"
    )
    assert "slow pairs within nodes" not in found


def test_a_job_that_fails_says_which_ranks_started_where() -> None:
    status = RunStatus(state="hang", reason="no rank finished a step for 60 s", failed_rank=1)
    found = by_name(failure(status, {0: {"host": "a"}, 1: {"host": "a"}}, Asked(4, "cpu")))
    assert found["ranks started"].found == "2 on a"
    assert found["ranks without a sign of life"].found == "2, 3"
    assert found["job over all nodes"].found.endswith("for 60 s (on a)")


@pytest.mark.parametrize("players", [0, 1, 2, 3, 4, 7, 8, 33])
def test_rounds_hold_every_pair_once_and_every_rank_once_a_round(players: int) -> None:
    rounds = rounds_of(range(100, 100 + players))
    pairs = Counter(pair for one in rounds for pair in one)
    assert len(pairs) == players * (players - 1) // 2
    assert set(pairs.values()) <= {1}
    for one in rounds:
        ranks = [rank for pair in one for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_nodes_may_have_different_numbers_of_ranks() -> None:
    facts = [{"node": n, "rank": r} for n, r in [(1, 4), (0, 1), (0, 0), (0, 2), (1, 3)]]
    assert ranks_by_node(facts) == {0: [0, 1, 2], 1: [3, 4]}


def test_in_an_allocation_of_several_nodes_the_job_is_spread_over_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def probe(job: Asked, launcher: object, *_: object) -> Probe:
        asked.append((job, type(launcher).__name__))
        return Probe([], finished=True)

    monkeypatch.setattr("bench.doctor.cluster.probe_cluster", probe)
    assert show_cluster(tmp_path, None, "cpu", as_json=True) == 0
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert show_cluster(tmp_path, None, "cpu", as_json=True) == 0
    assert asked == [
        (Asked(2, "cpu", 1), "LocalLauncher"),
        (Asked(6, "cpu", 3), "SlurmLauncher"),
    ]
    assert _job(asked[1][0]).launch.nodes == 3
    with pytest.raises(UsageError, match="a multiple of the 3 nodes"):
        show_cluster(tmp_path, 4, "cpu", as_json=True)


@pytest.mark.processes
def test_ranks_of_two_nodes_meet_and_measure_their_way(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(_job(Asked(3, "cpu")).model_dump_json())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    nodes = [("0", "alpha"), ("0", "alpha"), ("1", "beta")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.doctor.cluster_rank", str(tmp_path)],
            env=environment
            | {"RANK": str(rank), "GROUP_RANK": node, "SLURMD_NODENAME": name}
            | ({"NCCL_DEBUG": "INFO"} if name == "beta" else {}),
        )
        for rank, (node, name) in enumerate(nodes)
    ]
    try:
        assert [rank.wait(150) for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    found = json.loads((tmp_path / REPORT).read_text())
    assert [pair["ranks"] for pair in found["pairs"]] == [[0, 1], [0, 2]]
    (clock,) = found["clocks"]
    assert abs(clock["offset_seconds"]) <= clock["uncertainty_seconds"] + 1e-3
    judgement = by_name(judged(found))
    assert judgement["rendezvous"].found.startswith("3 ranks met: 2 on alpha, 1 on beta")
    assert judgement["NCCL_DEBUG differs"].found == 'null on most, "INFO" on beta'
