"""Where the agents of several nodes meet; no Slurm is needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.launch.code import own_code
from bench.launch.protocol import Order
from bench.launch.rendezvous import Rendezvous, node_number
from bench.launch.slurm import StepJob
from bench.resolve.resolution import resolve_anywhere
from bench.spec import LaunchSpec, RunSpec


def test_agents_meet_on_the_first_node_also_when_started_from_a_login_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in (
        ("scontrol", 'test "$4" = n1 && echo "NodeName=n1 NodeAddr=10.0.0.7 Port=6818"'),
        ("srun", f'echo "$MFSDP_BENCH_RENDEZVOUS" > {tmp_path}/rendezvous'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    (tmp_path / "logs").mkdir()
    run = resolve_anywhere(RunSpec(launch=LaunchSpec(ranks=2, nodes=2)))
    job = StepJob(Order(run, tmp_path, own_code(), "worker"), ["n1", "n2"])
    assert job.wait(20.0).exit_code == 0
    assert (tmp_path / "rendezvous").read_text().startswith("10.0.0.7:")


def test_agents_meet_where_their_environment_says() -> None:
    rendezvous = Rendezvous("fe80::1", 29500, 3)
    assert Rendezvous.from_environment(rendezvous.variables()) == rendezvous
    assert Rendezvous.from_environment({}) is None
    assert "--node-rank=2" in rendezvous.torchrun_arguments(2)
    assert node_number({"SLURM_PROCID": "5"}) == 5
    assert node_number({"MFSDP_BENCH_NODE": "1", "SLURM_PROCID": "5"}) == 1
    assert Rendezvous("127.0.0.1", 1, 2).interface() == "lo"
