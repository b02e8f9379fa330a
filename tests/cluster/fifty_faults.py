"""57 faults, and what is to be left of them: `make faults` injects them all under a real Slurm.

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
from cluster_runs import ENDLESS, Cluster
from two_node_slurm import NODES, TwoNodeSlurm

from bench.launch.command import RUN_DIR_VARIABLE
from bench.launch.local.process_tree import rank_of
from bench.record import FINISHED_GOOD
from sweeps.jobs import read_arrays

SAVED_WITHIN_SECONDS = 8.0
GOOD = tuple(FINISHED_GOOD)
KILL, TERM, INT, HUP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP
NO_REQUEUE = ("--launcher-option", "requeue=false")
ONE_MINUTE = ("--launcher-option", "time_minutes=1")

Act = Callable[["Scene"], object]


@dataclass(frozen=True)
class Fault:
    """One fault, and what is to be left of it.

    states: of the records, oldest first, as alternatives. says: in the reason of the first record.
    queued: it meets a job that waits, and not one whose ranks step. started: the act waits until
    they do.
    """

    kind: str
    name: str
    act: Act
    states: tuple[tuple[str, ...], ...]
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

    def run_again(self) -> None:
        """Another runner."""
        arguments = ("run", self.sweep, "--launcher", "slurm", *self.options)
        self.runner = self.cluster.start(*arguments)

    def cancel(self) -> None:
        code, out, err = self.cluster.run("cancel", "two")
        if code:
            raise RuntimeError(f"cancel ends with {code}: {out} {err}")

    def scancel(self, *options: str) -> None:
        self.slurm.command("scancel", *options, self.job)

    def scontrol(self, *words: str) -> None:
        self.slurm.command("scontrol", *words)

    def wait_for_records(self, count: int) -> None:
        """Until the newest of so many runs steps."""
        self.cluster.wait_for(
            lambda: len(found := self.cluster.records()) == count and len(found[-1].losses) > 0,
            f"{count} runs, the last of which steps",
        )


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


def kill(words: str, number: signal.Signals, *, rank: int | None = None, node: str = "") -> Act:
    return lambda scene: scene.process(words, rank=rank, node=node).send_signal(number)


def then(*acts: Act) -> Act:
    def all_of_them(scene: Scene) -> None:
        for act in acts:
            act(scene)

    return all_of_them


def later(seconds: float) -> Act:
    return lambda _: time.sleep(seconds)


def cancel(scene: Scene) -> None:
    scene.cancel()


def requeue(scene: Scene) -> None:
    scene.scontrol("requeue", scene.job)


def again_steps(count: int) -> Act:
    return lambda scene: scene.wait_for_records(count)


def program_is_there(scene: Scene) -> None:
    """It has begun its run."""
    scene.cluster.wait_for(lambda: len(scene.cluster.states()) == 1, "a run")


def pends(scene: Scene) -> None:
    scene.cluster.wait_for(lambda: scene.job in scene.slurm.jobs("pending"), "a job that waits")
    time.sleep(2)


def end_runner(number: signal.Signals) -> Act:
    def act(scene: Scene) -> None:
        scene.runner.send_signal(number)
        scene.runner.communicate(timeout=60)

    return act


def adopt(scene: Scene) -> None:
    scene.run_again()


def nodes(state: str) -> Act:
    def act(scene: Scene) -> None:
        words = [f"nodename={','.join(NODES)}", f"state={state}"]
        # A controller that was killed may have forgotten the drain: nothing to resume then.
        with contextlib.suppress(RuntimeError if state == "resume" else ()):
            scene.scontrol("update", *words, *(["reason=fault"] if state != "resume" else []))

    return act


def controller(seconds: float) -> Act:
    def act(scene: Scene) -> None:
        # One that dies within seconds of a job forgets it, or that it has started: it saves late.
        time.sleep(SAVED_WITHIN_SECONDS)
        scene.slurm.kill("slurmctld")
        time.sleep(seconds)
        scene.slurm.start_controller()

    return act


def slurmd(node: str, seconds: float) -> Act:
    def act(scene: Scene) -> None:
        scene.slurm.kill(node)
        time.sleep(seconds)
        scene.slurm.start_node(node)

    return act


def crash(node: str) -> Act:
    """Its power is cut, and comes back once the job is known to be gone."""

    def act(scene: Scene) -> None:
        scene.slurm.crash_node(node)
        try:
            scene.cluster.wait_for(
                lambda: scene.job not in scene.slurm.jobs("running"), "the end of the job"
            )
        finally:
            scene.slurm.start_node(node)

    return act


def preempt(scene: Scene) -> None:
    """A job that goes first takes both nodes for a moment."""
    scene.slurm.command(
        "sbatch", "-p", "urgent", "-N", "2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3"
    )
    scene.cluster.wait_for(lambda: scene.job not in scene.slurm.jobs("running"), "preemption")


def of_ranks() -> list[Fault]:
    crashed = (("crashed",),)
    found = [
        Fault("rank dies", f"SIG{name} to rank {rank}",
              kill("bench.launch.agent", signal.Signals[f"SIG{name}"], rank=rank), crashed,
              f"rank {rank} was ended by SIG{name}")
        for name in ("KILL", "TERM", "SEGV", "ABRT", "BUS", "INT")
        for rank in (0, 1)
    ]  # fmt: skip
    found += [
        Fault("agent dies", f"SIG{name} to the agent of {node}",
              kill("bench.launch.agent", signal.Signals[f"SIG{name}"], node=node), crashed,
              f"on {node} {how}")
        for name, how in (("KILL", "is gone without a word"), ("TERM", "was ended by SIGTERM"))
        for node in NODES
    ]  # fmt: skip
    program = "sweeps.job_program"
    return [
        *found,
        Fault("step dies", "SIGTERM to srun", kill("srun --nodes", TERM), crashed),
        Fault("step dies", "SIGKILL to srun", kill("srun --nodes", KILL), crashed),
        Fault("step dies", "scancel of the step", lambda s: s.slurm.command(
            "scancel", f"{s.job}.0"), (("crashed", "interrupted"),)),
        Fault("program of the job dies", "SIGKILL", kill(program, KILL), (("interrupted",),),
              "ended as FAILED"),
        Fault("program of the job dies", "SIGTERM", kill(program, TERM), (("interrupted",),)),
        Fault("program of the job dies", "SIGUSR1", kill(program, signal.SIGUSR1),
              (("timeout",),), "the time limit of job"),
    ]  # fmt: skip


def of_jobs() -> list[Fault]:
    stopped, twice = (("interrupted",),), (("preempted",), ("interrupted",))
    hold = lambda s: s.scontrol("requeuehold", s.job)  # noqa: E731
    release = lambda s: s.scontrol("release", s.job)  # noqa: E731
    return [
        Fault("job is cancelled", "scancel", lambda s: s.scancel(), stopped, "was cancelled"),
        Fault("job is cancelled", "scancel --full", lambda s: s.scancel("--full"), stopped),
        Fault("job is cancelled", "scancel --signal=KILL", lambda s: s.scancel("--signal=KILL"),
              (("interrupted", "crashed"),)),
        Fault("job is cancelled", "scancel --signal=TERM --full",
              lambda s: s.scancel("--signal=TERM", "--full"), stopped),
        Fault("job is cancelled", "cancel while the runner follows", cancel, stopped,
              "was cancelled"),
        Fault("job is cancelled", "cancel twice at once", lambda s: (
            (other := s.cluster.start("cancel", "two")), s.cancel(), other.communicate(timeout=90)
        ), stopped),
        Fault("job is requeued", "once", then(requeue, again_steps(2), cancel), twice, "requeued"),
        Fault("job is requeued", "twice",
              then(requeue, again_steps(2), requeue, again_steps(3), cancel),
              (("preempted",), *twice)),
        Fault("job is requeued", "held, then released",
              then(hold, pends, release, again_steps(2), cancel), twice),
        Fault("job is requeued", "held, then cancelled", then(hold, pends, cancel),
              (("preempted", "interrupted"),)),
        Fault("job is requeued", "while nobody follows",
              then(end_runner(KILL), requeue, again_steps(2), adopt, later(8), cancel), twice),
        Fault("job is preempted", "requeue on", then(preempt, again_steps(2), cancel), twice),
        Fault("job is preempted", "requeue off", preempt, (("preempted", "interrupted"),),
              options=NO_REQUEUE),
        Fault("time limit", "told before", later(0), (("timeout",),), "the time limit of job",
              options=(*ONE_MINUTE, "--launcher-option", "signal_seconds=40"),
              started=False),
        Fault("time limit", "program does not answer",
              then(program_is_there, kill("sweeps.job_program", signal.SIGSTOP)), (("timeout",),),
              options=(*ONE_MINUTE, "--launcher-option", "signal_seconds=5"),
              started=False),
    ]  # fmt: skip


def of_runners() -> list[Fault]:
    stopped, good = (("interrupted",),), (GOOD,)
    found = [
        Fault("login shell dies", f"SIG{number.name[3:]}, then cancel",
              then(end_runner(number), cancel), stopped, "was cancelled")
        for number in (HUP, TERM, INT, KILL)
    ]  # fmt: skip
    return [
        *found,
        Fault("login shell dies", "SIGKILL, the run ends alone, then run",
              then(end_runner(KILL), lambda s: s.cluster.wait_for(
                  lambda: not s.slurm.jobs(), "the end of the job"), adopt), good, steps=40),
        Fault("login shell dies", "SIGKILL, then a runner that adopts",
              then(end_runner(KILL), adopt), good, steps=120),
        Fault("login shell dies", "SIGKILL, the job is cancelled, then run",
              then(end_runner(KILL), lambda s: s.scancel(), later(3), adopt, again_steps(2),
                   cancel), (("interrupted",), ("interrupted",))),
    ]  # fmt: skip


def of_nodes_and_controllers() -> list[Fault]:
    stopped, good = (("interrupted",),), (GOOD,)
    found = [
        Fault("slurmd dies", f"of {node}, and comes back", slurmd(node, 2), good, steps=80)
        for node in NODES
    ] + [
        Fault("node dies", f"{node}", crash(node), (("interrupted", "crashed"),), "lost",
              options=NO_REQUEUE)
        for node in NODES
    ]  # fmt: skip
    return [
        *found,
        Fault("node dies", "n2, and the job is started again",
              then(crash("n2"), again_steps(2), cancel),
              (("interrupted", "preempted", "crashed"), ("interrupted",))),
        Fault("node dies", "set down by an operator", then(nodes("down"), later(6),
              nodes("resume")), (("interrupted", "preempted"),), options=NO_REQUEUE),
        Fault("node is drained", "while a job runs", then(nodes("drain"), later(6),
              nodes("resume")), good, steps=80),
        Fault("node is drained", "while a job waits", then(later(3), nodes("resume")), good,
              steps=6, queued=True),
        Fault("node is drained", "and the waiting job is cancelled", then(cancel,
              nodes("resume")), (), queued=True),
        Fault("node is drained", "and the waiting job's runner is killed",
              then(end_runner(KILL), adopt, nodes("resume")), good, steps=6,
              queued=True),
        Fault("controller restarts", "while a job runs", controller(8), good, steps=80),
        Fault("controller restarts", "while a job waits",
              then(controller(6), nodes("resume")), good, steps=6, queued=True),
        Fault("controller restarts", "and the runner is killed meanwhile",
              then(end_runner(KILL), controller(3), adopt, later(8), cancel), stopped),
    ]  # fmt: skip


def faults() -> list[Fault]:
    return [*of_ranks(), *of_jobs(), *of_runners(), *of_nodes_and_controllers()]


def inject(cluster: Cluster, fault: Fault) -> list[str]:
    """Start a sweep, do it; what is wrong with what is left."""
    problems = []
    sweep = cluster.sweep(steps=fault.steps)
    arguments = ("run", sweep, "--launcher", "slurm", *fault.options)
    if fault.queued:
        nodes("drain")(Scene(cluster, sweep, None, ()))  # type: ignore[arg-type]
    scene = Scene(cluster, sweep, cluster.start(*arguments), fault.options)
    try:
        if fault.queued:
            cluster.wait_for(lambda: len(cluster.slurm.jobs()) == 1, "a job that waits")
        elif fault.started:
            cluster.wait_for_steps()
        fault.act(scene)
        scene.runner.communicate(timeout=150)
    except Exception as error:
        problems.append(f"raised {error!r}")
    return [*problems, *_left(scene), *_wrong_in_records(scene, fault)]


def _left(scene: Scene) -> list[str]:
    """Jobs and processes; these are ended."""
    scene.runner.kill()
    deadline = time.monotonic() + 15
    while (left := [*_jobs(scene), *scene.processes()]) and time.monotonic() < deadline:
        time.sleep(0.5)
    for process in scene.processes():
        process.kill()
    return [f"left: {one}" for one in left]


def _wrong_in_records(scene: Scene, fault: Fault) -> list[str]:
    records = scene.cluster.records()
    damaged = [*scene.cluster.store.outlines()[1], *(one.problems for one in records)]
    problems = [str(one) for one in damaged if one and one != ("env.json is missing",)]
    states = [record.status.state for record in records]
    expected = len(states) == len(fault.states) and all(
        state in allowed for state, allowed in zip(states, fault.states, strict=True)
    )
    reason = records[0].status.reason if records else fault.says
    ended = all(record.status.ended_utc for record in records)
    if not (expected and fault.says in reason and ended):
        problems.append(f"expected {fault.states} {fault.says!r}, found {states} {reason!r}")
    return problems


def _jobs(scene: Scene) -> list[str]:
    arrays = {array.id for array in read_arrays(scene.cluster.store, "two")}
    return [job for job in scene.slurm.jobs() if job.partition("_")[0] in arrays]
