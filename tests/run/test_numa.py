"""Ranks keep to the NUMA node of their device, or share the nodes in blocks."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.worker.numa import bind_to_node

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
Bound = list[set[int]]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Bound:
    """What the process was bound to; it may use processors 0 to 7."""
    found: Bound = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)), raising=False)

    def bind(_process: int, cpus: set[int]) -> None:
        found.append(cpus)

    monkeypatch.setattr(os, "sched_setaffinity", bind, raising=False)
    return found


def machine(tmp_path: Path, *cpulists: str) -> Path:
    for number, text in enumerate(cpulists):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    return tmp_path


def test_ranks_share_the_nodes_in_blocks(tmp_path: Path, bound: Bound) -> None:
    system = machine(tmp_path, "0-1,4-5", "2-3,6-7")
    nodes = [bind_to_node(CPU, rank, 4, 1, system) for rank in range(4)]
    assert nodes == [0, 0, 1, 1]
    assert bound == [{0, 1, 4, 5}] * 2 + [{2, 3, 6, 7}] * 2


@pytest.mark.parametrize(
    ("cpulists", "threads"),
    [
        (["0-7"], 1),
        # The other node's processors are not this process's.
        (["0-7", "8-15"], 1),
        # A node without processors, as memory alone has.
        (["0-7", ""], 1),
        (["0-3", "4-7"], 8),
    ],
)
def test_where_there_is_nothing_to_choose_a_rank_stays_as_it_is(
    tmp_path: Path, bound: Bound, cpulists: list[str], threads: int
) -> None:
    assert bind_to_node(CPU, 0, 2, threads, machine(tmp_path, *cpulists)) is None
    assert bound == []


@pytest.mark.parametrize(("text", "node"), [("1", 1), ("-1", None), (None, None)])
def test_a_device_decides_for_its_rank(
    tmp_path: Path,
    bound: Bound,
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    node: int | None,
) -> None:
    system = machine(tmp_path, "0-3", "4-7")
    facts = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: facts)
    slot = system / "bus/pci/devices/0000:3b:00.0"
    slot.mkdir(parents=True)
    if text is not None:
        (slot / "numa_node").write_text(text)
    assert bind_to_node(CUDA, 0, 2, 1, system) == node
    assert bound == ([{4, 5, 6, 7}] if node else [])
