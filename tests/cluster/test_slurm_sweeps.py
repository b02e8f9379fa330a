"""Sweeps under a real Slurm of two nodes: what its jobs make, and what becomes of them."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest
from cluster_runs import ENDLESS, Cluster, end
from two_node_slurm import NODES

from bench.record import FINISHED_GOOD
from bench.store import ResultsStore

# On a machine with other work a run takes a minute.
pytestmark = [pytest.mark.processes, pytest.mark.needs("slurm")]


@pytest.mark.nightly
def test_losses_on_two_nodes_are_those_of_one_machine(cluster: Cluster) -> None:
    sweep = cluster.sweep_of(steps=12)
    here = cluster.start("run", sweep, "--set", "launch.nodes=1", "--results", "local")
    err = cluster.run("run", sweep, "--launcher", "slurm").stderr
    (remote,) = cluster.records()
    assert remote.status.state in FINISHED_GOOD, err
    assert remote.placement is not None
    assert remote.placement.nodes == NODES
    assert remote.environment["argv"][1:] == ["run", str(sweep), "--launcher", "slurm"]

    _, err = here.communicate(timeout=200)
    (local,) = ResultsStore.open(cluster.folder / "local", create=False).records()
    assert local.status.state in FINISHED_GOOD, err
    assert remote.losses == local.losses
    assert len(local.losses) == 12


def test_a_killed_runner_is_followed_by_one_that_adopts_and_ctrl_c_leaves_jobs_alone(
    cluster: Cluster,
) -> None:
    sweep = cluster.sweep_of(steps=ENDLESS, engines="ddp, mfsdp", options="exclusive: true")
    runner = cluster.start("run", sweep, "--launcher", "slurm")
    cluster.wait_for_steps()
    end(runner, signal.SIGKILL)
    queued = set(cluster.slurm.jobs())
    assert len(queued) == 2

    lines = json.loads(cluster.run("status", "two", "--json").stdout)["sweeps"][0]["runs"]
    assert {line["job"] for line in lines} == queued
    (waiting,) = (line for line in lines if line["state"] == "queued")
    assert waiting["reason"] in {"Resources", "Priority"}

    runner = cluster.start("run", sweep, "--launcher", "slurm")
    assert runner.stderr is not None
    said = ""
    while "2 of them found in the queue" not in said:
        said = runner.stderr.readline()
        assert said, "the runner ended"
    code, err = end(runner, signal.SIGINT)
    assert code == 130
    assert "mfsdp-bench cancel two" in err
    assert set(cluster.slurm.jobs()) == queued, "nothing was submitted, and nothing ended"

    done = cluster.run("cancel", "two")
    assert done.returncode == 0, done.stderr
    assert "2 jobs cancelled, 0 still there" in done.stdout
    (record,) = cluster.records()
    assert record.status.state == "interrupted"
    assert "was cancelled" in record.status.reason


@pytest.mark.nightly
def test_a_requeued_job_goes_on_with_what_is_missing(cluster: Cluster) -> None:
    sweep = cluster.sweep_of(steps=60)
    runner = cluster.start("run", sweep, "--launcher", "slurm", "--repeat", "2")
    cluster.wait_for(lambda: "ok" in cluster.states() or "unstable" in cluster.states(), "one run")
    cluster.wait_for(lambda: len(cluster.states()) == 2, "the second run")
    (job,) = cluster.slurm.jobs("running")
    cluster.slurm.command("scontrol", "requeue", job)
    _, err = runner.communicate(timeout=200)

    first, second, third = cluster.records()
    assert first.status.state in FINISHED_GOOD, err
    assert second.status.state == "preempted", second.status.reason
    assert "requeued" in second.status.reason
    assert third.status.state in FINISHED_GOOD, "the job has gone on where it was"
    assert (first.status.repeat, second.status.repeat, third.status.repeat) == (0, 1, 1)
    assert {one.status.job for one in cluster.records()} == {job}


@pytest.mark.nightly
def test_200_cells_are_one_array_that_the_next_runner_adopts(cluster: Cluster) -> None:
    rates = ", ".join(str(n) for n in range(1, 201))
    sweep = cluster.sweep_of(steps=ENDLESS)
    text = sweep.read_text().replace("engine.name: [mfsdp]", f"train.seed: [{rates}]")
    sweep.write_text(text)
    # Nothing is to run: only the queue is looked at.
    cluster.slurm.command("scontrol", "update", "nodename=ALL", "state=drain", "reason=test")
    try:
        runner = cluster.start(
            "run", sweep, "--launcher", "slurm", "--launcher-option", "max_jobs=2"
        )
        cluster.wait_for(lambda: len(cluster.slurm.jobs()) == 200, "200 jobs")
        before, begun = asked(cluster), time.monotonic()
        time.sleep(21)
        questions = asked(cluster) - before
        assert questions <= 1 + (time.monotonic() - begun) / 5, "at most one question per 5 s"
        end(runner, signal.SIGKILL)

        runner = cluster.start("run", sweep, "--launcher", "slurm")
        time.sleep(12)
        code, err = end(runner, signal.SIGINT)
        assert code == 130
        assert "200 of them found in the queue" in err
        assert len(cluster.slurm.jobs()) == 200
        done = cluster.run("cancel", "two")
        assert "200 jobs cancelled, 0 still there" in done.stdout, done.stderr
    finally:
        cluster.slurm.command("scontrol", "update", "nodename=ALL", "state=resume")


def asked(cluster: Cluster) -> int:
    """Requests for the list of jobs that the controller has answered so far."""
    counts = cluster.slurm.command("sdiag")
    found = re.search(r"REQUEST_JOB_INFO\s+\(\s*\d+\)\s+count:(\d+)", counts)
    return int(found[1]) if found else 0
