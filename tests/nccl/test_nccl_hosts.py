"""A communicator that spans nodes names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nccl_lines import coll, info, init, ring
from reports.nccl.audit import audit_paths
from reports.nccl.presentation import communicator_text


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
