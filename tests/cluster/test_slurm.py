"""A sweep inside one allocation of a real Slurm of two nodes, and what becomes of it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest
from cluster_runs import ENDLESS, Cluster
from command_line import CHECKOUT
from two_node_slurm import NODES

from bench.record import FINISHED_GOOD
from bench.store import ResultsStore

# On a machine with other work a run takes a minute.
pytestmark = [pytest.mark.processes, pytest.mark.needs("slurm")]

PAGE = (CHECKOUT / "docs" / "sweep-file.md").read_text().partition("## Several machines")[2]
PAGE = PAGE.partition("### Hosts of your own")[0]


def test_losses_on_two_nodes_are_those_of_one_machine(cluster: Cluster) -> None:
    sweep = cluster.sweep_of(steps=12)
    cluster.submit(sweep)
    here = cluster.run("run", sweep, "--set", "launch.nodes=1", "--results", "local")
    cluster.ready()
    (remote,) = cluster.records()
    assert remote.status.state in FINISHED_GOOD, cluster.said()
    assert remote.placement is not None
    assert remote.placement.nodes == NODES
    assert remote.environment["argv"][1:] == ["run", str(sweep), "--launcher", "slurm"]
    (local,) = ResultsStore.open(cluster.folder / "local", create=False).records()
    assert local.status.state in FINISHED_GOOD, here.stderr
    assert remote.losses == local.losses
    assert len(local.losses) == 12


def test_a_cell_on_one_node_and_one_that_is_too_large_for_the_allocation(cluster: Cluster) -> None:
    text = (
        cluster.sweep_of(nodes=1)
        .read_text()
        .replace("engine.name: [mfsdp]", "launch.nodes: [1, 2]")
    )
    cluster.submit(cluster.sweep(text, "two.yaml"), nodes=1)
    cluster.ready()
    assert "needs 2 nodes; found 1" in cluster.said()
    ((_, state),) = cluster.runs()
    assert state in FINISHED_GOOD, cluster.said()


Act = Callable[[Cluster, str], object]


def slurm(*command: str) -> Act:
    return lambda cluster, job: cluster.slurm.command(*command, job)


def signalled(words: str, number: signal.Signals) -> Act:
    """To the processes of the job with `words` in their command line."""

    def act(cluster: Cluster, _job: str) -> None:
        found = [one for one in cluster.slurm.tasks() if words in " ".join(one.cmdline())]
        assert found, words
        for one in found:
            one.send_signal(number)

    return act


@pytest.mark.parametrize(
    ("act", "options", "says"),
    [
        (slurm("scancel"), (), "SIGTERM, in job"),
        pytest.param(slurm("scancel", "--signal=KILL"), (), "", marks=pytest.mark.nightly),
        pytest.param(lambda *_: None, ("--time=1",), "SIGTERM, in job", marks=pytest.mark.nightly),
        pytest.param(
            lambda cluster, _: cluster.slurm.crash_node("n2"),
            ("--no-requeue",),
            "",
            marks=pytest.mark.nightly,
        ),
        pytest.param(signalled("-m bench run", signal.SIGKILL), (), "", marks=pytest.mark.nightly),
    ],
    ids=["scancel", "steps are killed", "time limit", "node dies", "runner dies of SIGKILL"],
)
def test_a_job_that_ends_early_leaves_its_record_and_the_next_goes_on(
    cluster: Cluster, act: Act, options: tuple[str, ...], says: str
) -> None:
    sweep = cluster.sweep_of(steps=ENDLESS)
    job = cluster.submit(sweep, *options)
    cluster.wait_for_steps()
    act(cluster, job)
    cluster.wait_for(lambda: not cluster.slurm.jobs(), "the end of the job")
    if cluster.slurm.node_states() != {"idle"}:
        cluster.slurm.start_node("n2")
    cluster.ready()
    (first,) = cluster.records()
    assert first.status.state in {"interrupted", "crashed"}, first.status
    assert says in first.status.reason
    assert cluster.alive() == []

    cluster.sweep_of(steps=6)
    cluster.submit(sweep, "--nodelist=n1,n2")
    cluster.ready()
    assert cluster.records()[-1].status.state in FINISHED_GOOD, cluster.said()


@pytest.mark.nightly
def test_a_requeued_job_goes_on_with_what_is_missing(cluster: Cluster) -> None:
    sweep = cluster.sweep_of(steps=60, engines="ddp, mfsdp")
    job = cluster.submit(sweep)
    cluster.wait_for(lambda: len(cluster.runs()) == 2, "the second run")
    cluster.slurm.command("scontrol", "requeue", job)
    cluster.ready()
    first, second, third = cluster.records()
    assert first.status.state in FINISHED_GOOD, cluster.said()
    assert second.status.state == "interrupted", second.status.reason
    assert third.status.state in FINISHED_GOOD, cluster.said()
    assert (second.status.cell, third.status.cell) == (third.status.cell, second.status.cell)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_can_be_followed(cluster: Cluster) -> None:
    (sweep,) = blocks("yaml")
    (commands,) = blocks("sh")
    cluster.sweep(sweep, "nodes.yaml")
    for command in commands.splitlines():
        done = cluster.shell(command)
        # 12 steps may be unsteady on a busy machine; that is exit code 3 and no failure of a run.
        assert done.returncode in ({0, 3} if "sbatch" in command else {0}), (command, done.stderr)
    assert [state in FINISHED_GOOD for _, state in cluster.runs()] == [True, True]


@pytest.mark.nightly
def test_the_gate_of_every_night_is_a_job_and_a_verdict(cluster: Cluster) -> None:
    text = cluster.sweep_of(steps=12, nodes=1).read_text().replace("name: two", "name: nightly")
    sweep = cluster.sweep(text, "nightly.yaml")
    cluster.submit(sweep, nodes=1)
    cluster.ready()
    assert cluster.run("baseline", "save", "main", "nightly").returncode == 0
    recipe = CHECKOUT / "docs" / "recipes" / "nightly-slurm.sh"
    done = cluster.shell(f"REPEAT=3 sh {recipe} nightly.yaml main")
    assert done.returncode in {0, 1}, done.stderr
    out = cluster.folder / "nightly"
    assert {"gate.xml", "gate.md"} <= {file.name for file in out.iterdir()}
    assert len(cluster.runs()) == 3, "one of the baseline, and two more"
