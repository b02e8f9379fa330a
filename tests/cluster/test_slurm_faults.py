"""What goes wrong on a cluster, one thing after another, in a real Slurm of two nodes."""

from __future__ import annotations

import pytest
from cluster_runs import ENDLESS, Cluster
from two_node_slurm import NODES

from bench.record import FINISHED_GOOD

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(480)]


def test_a_job_is_told_before_its_time_limit(cluster: Cluster) -> None:
    sweep = cluster.sweep(steps=ENDLESS)
    settings = ("--launcher-option", "time_minutes=1", "--launcher-option", "signal_seconds=55")
    code, _, err = cluster.run("run", sweep, "--launcher", "slurm", *settings)
    (record,) = cluster.records()
    assert code == 3, err
    assert record.status.state == "timeout"
    assert "the time limit of job" in record.status.reason
    assert record.status.ended_utc is not None


def test_a_controller_that_restarts_costs_nothing(cluster: Cluster) -> None:
    sweep = cluster.sweep(steps=60)
    runner = cluster.start("run", sweep, "--launcher", "slurm")
    cluster.wait_for_steps()
    cluster.slurm.kill("slurmctld")
    cluster.wait_for(lambda: set(cluster.states()) <= FINISHED_GOOD, "the end of the run")
    cluster.slurm.start_controller()
    _, err = runner.communicate(timeout=90)
    assert set(cluster.states()) <= FINISHED_GOOD
    assert "1 of 1 runs finished" in err


def test_a_slurmd_that_dies_alone_costs_nothing(cluster: Cluster) -> None:
    sweep = cluster.sweep(steps=60)
    runner = cluster.start("run", sweep, "--launcher", "slurm")
    cluster.wait_for_steps()
    cluster.slurm.kill("n2")
    cluster.slurm.start_node("n2")
    _, err = runner.communicate(timeout=90)
    assert set(cluster.states()) <= FINISHED_GOOD, err


def test_jobs_wait_for_drained_nodes_and_say_so(cluster: Cluster) -> None:
    for node in NODES:
        cluster.slurm.command(
            "scontrol", "update", f"nodename={node}", "state=drain", "reason=broken fan"
        )
    try:
        runner = cluster.start("run", cluster.sweep(), "--launcher", "slurm")
        cluster.wait_for(lambda: len(cluster.slurm.jobs()) == 1, "a job")
        _, out, _ = cluster.run("status", "two")
        assert "queued" in out
        assert "DRAINED" in out.upper() or "Resources" in out
    finally:
        for node in NODES:
            cluster.slurm.command("scontrol", "update", f"nodename={node}", "state=resume")
    runner.communicate(timeout=90)
    assert set(cluster.states()) <= FINISHED_GOOD


def test_the_first_node_dies_and_the_runner_settles_its_run(cluster: Cluster) -> None:
    state, reason = cluster.after_a_crash_of("n1")
    assert state == "interrupted"
    assert "lost" in reason
