"""What goes wrong on a cluster, one thing after another: `make faults` injects it in a real Slurm.

Each fault meets one job of two ranks on two nodes, with a runner that follows it. Records must be
whole and say the expected states and reason, and neither jobs nor processes may be left.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from cluster_runs import ENDLESS, Cluster
from two_node_slurm import NODES, TwoNodeSlurm

from bench.launch.command import RUN_DIR_VARIABLE
from bench.launch.local.process_tree import rank_of
from sweeps.jobs import read_arrays

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.processes,
    pytest.mark.needs("slurm"),
]

SAVED_WITHIN_SECONDS = 8.0
KILL, TERM, INT, HUP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP
NO_REQUEUE = ("--launcher-option", "requeue=false")
ONE_MINUTE = ("--launcher-option", "time_minutes=1", "--launcher-option")
AGENT, PROGRAM = "bench.launch.agent", "sweeps.job_program"

Act = Callable[["Scene"], object]


@dataclass(frozen=True)
class Fault:
    """One fault, and what is to be left of it.

    states: of the records, oldest first, with / between alternatives. says: in the reason of the
    first record. queued: it meets a job that waits, and not one whose ranks step. started: the act
    waits until they do.
    """

    act: Act
    states: str
    says: str = ""
    steps: int = ENDLESS
    options: tuple[str, ...] = ()
    queued: bool = False
    started: bool = True


@dataclass
class Scene:
    """A sweep of one job that goes on, and what an act can reach of it."""

    cluster: Cluster
    sweep: Path
    runner: subprocess.Popen[str]
    options: tuple[str, ...]

    @property
    def slurm(self) -> TwoNodeSlurm:
        return self.cluster.slurm

    @property
    def job(self) -> str:
        """Its id, as Slurm has it."""
        (array,) = read_arrays(self.cluster.store, "two")
        return f"{array.id}_0"

    def process(self, words: str, *, rank: int | None = None, node: str = "") -> psutil.Process:
        """The one process of this job with `words` in its command line."""
        found = [one for one in self.processes() if words in " ".join(_line(one))]
        found = [one for one in found if rank is None or rank_of(one) == rank]
        found = [one for one in found if node in {"", _variable(one, "SLURMD_NODENAME")}]
        # srun and what it starts share their words; it forks, too.
        found = [one for one in found if words.startswith("srun") == ("srun" in _line(one)[0])]
        return min(found, key=lambda one: one.pid)

    def processes(self) -> list[psutil.Process]:
        """Everything that works for this results folder on the nodes."""
        folder = str(self.cluster.folder)
        return [
            one
            for one in psutil.process_iter()
            if _variable(one, "SLURMD_NODENAME")
            and (_variable(one, RUN_DIR_VARIABLE).startswith(folder) or folder in str(_line(one)))
        ]

    def jobs(self) -> list[str]:
        """Those of this sweep that are in the queue."""
        arrays = {array.id for array in read_arrays(self.cluster.store, "two")}
        return [job for job in self.slurm.jobs() if job.partition("_")[0] in arrays]


def _line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _variable(process: psutil.Process, name: str) -> str:
    try:
        return str(process.environ().get(name, ""))
    except (psutil.Error, OSError):
        return ""


# -- acts --------------------------------------------------------------------------------------


def then(*acts: Act) -> Act:
    return lambda scene: [act(scene) for act in acts]


def later(seconds: float) -> Act:
    return lambda _: time.sleep(seconds)


def kill(words: str, number: signal.Signals, *, rank: int | None = None, node: str = "") -> Act:
    return lambda scene: scene.process(words, rank=rank, node=node).send_signal(number)


def scancel(*options: str, of: str = "") -> Act:
    return lambda scene: scene.slurm.command("scancel", *options, of.format(scene.job) or scene.job)


def scontrol(word: str) -> Act:
    return lambda scene: scene.slurm.command("scontrol", word, scene.job)


def cancel(scene: Scene) -> None:
    done = scene.cluster.run("cancel", "two")
    assert done.returncode == 0, done


def cancel_twice(scene: Scene) -> None:
    other = scene.cluster.start("cancel", "two")
    cancel(scene)
    other.communicate(timeout=200)


def steps_again(count: int) -> Act:
    """Waits until the newest of so many runs steps."""
    return lambda scene: scene.cluster.wait_for(
        lambda: len(found := scene.cluster.records()) == count and len(found[-1].losses) > 0,
        f"{count} runs, the last of which steps",
    )


def program_is_there(scene: Scene) -> None:
    """It has begun its run."""
    scene.cluster.wait_for(lambda: len(scene.cluster.states()) == 1, "a run")


def pends(scene: Scene) -> None:
    scene.cluster.wait_for(lambda: scene.job in scene.slurm.jobs("pending"), "a job that waits")
    time.sleep(2)


def end_of_job(scene: Scene) -> None:
    scene.cluster.wait_for(
        lambda: scene.job not in scene.slurm.jobs("running"), "the end of the job"
    )


def empty_queue(scene: Scene) -> None:
    scene.cluster.wait_for(lambda: not scene.slurm.jobs(), "the end of the job")


def end_runner(number: signal.Signals) -> Act:
    def act(scene: Scene) -> None:
        scene.runner.send_signal(number)
        scene.runner.communicate(timeout=200)

    return act


def run(scene: Scene) -> None:
    """A runner, which adopts the job that is there."""
    arguments = ("run", scene.sweep, "--launcher", "slurm", *scene.options)
    scene.runner = scene.cluster.start(*arguments)


def nodes(state: str) -> Act:
    def act(scene: Scene) -> None:
        words = [f"nodename={','.join(NODES)}", f"state={state}"]
        # A controller that was killed may have forgotten the drain: nothing to resume then.
        with contextlib.suppress(RuntimeError if state == "resume" else ()):
            more = ["reason=fault"] if state != "resume" else []
            scene.slurm.command("scontrol", "update", *words, *more)

    return act


def controller(seconds: float) -> Act:
    def act(scene: Scene) -> None:
        # One that dies within seconds of a job forgets it, or that it has started: it saves late.
        time.sleep(SAVED_WITHIN_SECONDS)
        scene.slurm.kill("slurmctld")
        time.sleep(seconds)
        scene.slurm.start_controller()

    return act


def slurmd(node: str) -> Act:
    def act(scene: Scene) -> None:
        scene.slurm.kill(node)
        time.sleep(2)
        scene.slurm.start_node(node)

    return act


def crash(node: str) -> Act:
    """Its power is cut, and comes back once the job is known to be gone."""

    def act(scene: Scene) -> None:
        scene.slurm.crash_node(node)
        try:
            end_of_job(scene)
        finally:
            scene.slurm.start_node(node)

    return act


def preempt(scene: Scene) -> None:
    """A job that goes first takes both nodes for a moment."""
    first = ("-p", "urgent", "-N", "2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3")
    scene.slurm.command("sbatch", *first)
    end_of_job(scene)


# -- faults ------------------------------------------------------------------------------------

GONE, LIMIT = "was cancelled", "the time limit of job"
REQUEUE, AGAIN = scontrol("requeue"), then(steps_again(2), cancel)
HOLD, RELEASE, DIES = scontrol("requeuehold"), scontrol("release"), end_runner(KILL)
RESUME, USR1 = nodes("resume"), signal.SIGUSR1
GOOD = "ok/unstable"
WAITS = {"steps": 6, "queued": True}

#: Which signals end a rank, and how, is told in tests/run/faults.
FAULTS = {
    "rank 0 dies of SIGKILL": Fault(kill(AGENT, KILL, rank=0), "crashed", "rank 0 was ended by"),
    "rank 1 dies of SIGINT": Fault(kill(AGENT, INT, rank=1), "crashed", "by SIGINT"),
    "agent dies of SIGKILL": Fault(kill(AGENT, KILL, node="n1"), "crashed", "on n1 is gone"),
    "agent dies of SIGTERM": Fault(kill(AGENT, TERM, node="n2"), "crashed", "on n2 was ended"),
    "step dies of SIGKILL to srun": Fault(kill("srun --nodes", KILL), "crashed"),
    "step is cancelled": Fault(scancel(of="{}.0"), "crashed/interrupted"),
    "program of the job dies of SIGKILL": Fault(kill(PROGRAM, KILL), "interrupted", "as FAILED"),
    "program of the job dies of SIGTERM": Fault(kill(PROGRAM, TERM), "interrupted"),
    "program of the job gets SIGUSR1": Fault(kill(PROGRAM, USR1), "timeout", LIMIT),
    "scancel": Fault(scancel(), "interrupted", GONE),
    "scancel --full": Fault(scancel("--full"), "interrupted"),
    "scancel --signal=KILL": Fault(scancel("--signal=KILL"), "interrupted/crashed"),
    "cancel while the runner follows": Fault(cancel, "interrupted", GONE),
    "cancel twice at once": Fault(cancel_twice, "interrupted"),
    "job is requeued": Fault(then(REQUEUE, AGAIN), "preempted interrupted", "requeued"),
    "job is held, then released": Fault(then(HOLD, pends, RELEASE, AGAIN), "preempted interrupted"),
    "job is held, then cancelled": Fault(then(HOLD, pends, cancel), "preempted/interrupted"),
    "job is requeued while nobody follows": Fault(
        then(DIES, REQUEUE, steps_again(2), run, later(8), cancel), "preempted interrupted"
    ),
    "job is preempted": Fault(then(preempt, AGAIN), "preempted interrupted"),
    "job is preempted for good": Fault(preempt, "preempted/interrupted", options=NO_REQUEUE),
    "time limit, told before": Fault(
        later(0), "timeout", LIMIT, options=(*ONE_MINUTE, "signal_seconds=40"), started=False
    ),
    "time limit, and the program does not answer": Fault(
        then(program_is_there, kill(PROGRAM, signal.SIGSTOP)),
        "timeout",
        options=(*ONE_MINUTE, "signal_seconds=5"),
        started=False,
    ),
    "login shell dies of SIGHUP": Fault(then(end_runner(HUP), cancel), "interrupted", GONE),
    "login shell dies of SIGKILL": Fault(then(DIES, cancel), "interrupted", GONE),
    "runner dies, and the run ends alone": Fault(then(DIES, empty_queue, run), GOOD, steps=40),
    "runner dies, and the job is cancelled": Fault(
        then(DIES, scancel(), later(3), run, AGAIN), "interrupted interrupted"
    ),
    "slurmd dies and comes back": Fault(slurmd("n1"), GOOD, steps=80),
    "node dies": Fault(crash("n1"), "interrupted/crashed", "lost", options=NO_REQUEUE),
    "node dies, and the job starts again": Fault(
        then(crash("n2"), AGAIN), "interrupted/preempted/crashed interrupted"
    ),
    "nodes are set down by an operator": Fault(
        then(nodes("down"), later(6), RESUME), "interrupted/preempted", options=NO_REQUEUE
    ),
    "nodes are drained while a job runs": Fault(
        then(nodes("drain"), later(6), RESUME), GOOD, steps=80
    ),
    "a waiting job is cancelled": Fault(then(cancel, RESUME), "", queued=True),
    "the runner of a waiting job dies": Fault(then(DIES, run, RESUME), GOOD, **WAITS),
    "controller restarts while a job runs": Fault(controller(8), GOOD, steps=80),
    "controller restarts while a job waits": Fault(then(controller(6), RESUME), GOOD, **WAITS),
    "controller restarts, and the runner dies": Fault(
        then(DIES, controller(3), run, later(8), cancel), "interrupted"
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_leaves_the_records_that_it_should_and_nothing_else(
    cluster: Cluster, fault: Fault
) -> None:
    sweep = cluster.sweep_of(steps=fault.steps)
    scene = Scene(cluster, sweep, None, fault.options)  # type: ignore[arg-type]
    if fault.queued:
        nodes("drain")(scene)
    run(scene)
    try:
        if fault.queued:
            cluster.wait_for(lambda: len(cluster.slurm.jobs()) == 1, "a job that waits")
        elif fault.started:
            cluster.wait_for_steps()
        fault.act(scene)
        scene.runner.communicate(timeout=200)
    finally:
        left = _left(scene)
    assert left == []
    records = cluster.records()
    damaged = [*cluster.store.outlines()[1], *(one.problems for one in records)]
    assert [one for one in damaged if one and one != ("env.json is missing",)] == []
    allowed = [one.split("/") for one in fault.states.split()]
    states = [record.status.state for record in records]
    assert len(states) == len(allowed), states
    assert all(one in some for one, some in zip(states, allowed, strict=True)), states
    assert all(record.status.ended_utc for record in records)
    if records:
        assert fault.says in records[0].status.reason


def _left(scene: Scene) -> list[object]:
    """Jobs and processes; these are ended."""
    scene.runner.kill()
    deadline = time.monotonic() + 15
    while (left := [*scene.jobs(), *scene.processes()]) and time.monotonic() < deadline:
        time.sleep(0.5)
    for process in scene.processes():
        process.kill()
    return left
