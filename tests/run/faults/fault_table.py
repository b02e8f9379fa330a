"""Faults, and what their records must say: `make faults` injects all, a day's tests a few.

Each is one run with the real launcher, the real agent and scripted ranks. Its record must be whole
and name state and cause, and no process may be left.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.launch.command import RUN_DIR_VARIABLE
from bench.launch.run import launch
from bench.launch.watch import Limits, StopRequest
from bench.record import RunStatus
from bench.resolve.resolution import resolve_anywhere
from bench.spec import LaunchSpec, ResolvedRun, RunSpec, TrainSpec
from bench.store import ResultsStore, RunFolder

HERE = Path(__file__).resolve()
ENDLESS = 100_000
LIMITS = Limits(tick_seconds=0.1, grace_seconds=1.0, startup_allowance_seconds=60.0)

Script = dict[int, tuple[int, str]]
Act = Callable[["Scene"], None]
# Those whose default action ends a process and that nobody here listens to.
SIGNALS = (
    "ABRT", "ALRM", "BUS", "FPE", "HUP", "ILL", "INT", "KILL", "QUIT", "SEGV", "TERM", "USR2",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One fault, and what the record must say.

    state: "removed" where no record survives. rank: the cause, None for no rank. logged: what
    stands in the log of rank 0.
    """

    state: str
    rank: int | None
    says: str
    script: Script = field(default_factory=dict)
    act: Act | None = None
    steps: int = ENDLESS
    limits: dict[str, float] = field(default_factory=dict)
    signals_to_launcher: tuple[signal.Signals, ...] = ()
    logged: tuple[str, ...] = ()


@dataclass
class Scene:
    """A run that is going on: what an act from outside can reach."""

    folder: RunFolder
    stop: StopRequest
    done: bool = False

    def pid(self, rank: int) -> int:
        return int((self.folder.path / f"pid.rank{rank}").read_text())

    def agent(self) -> psutil.Process:
        return psutil.Process(self.pid(0)).parent()


def kill_rank(rank: int, number: signal.Signals) -> Act:
    return lambda scene: os.kill(scene.pid(rank), number)


def signal_agent(number: signal.Signals) -> Act:
    return lambda scene: scene.agent().send_signal(number)


def ask_to_stop(scene: Scene) -> None:
    scene.stop.set()


def remove_folder(scene: Scene) -> None:
    scene.folder.path.rename(scene.folder.path.with_name("removed"))


def of_rank(rank: int, act: str, state: str, says: str, *, notices: bool = True) -> Fault:
    """It misbehaves at step 4, and the other one notices or waits."""
    script: Script = {rank: (4, act)} | ({1 - rank: (2, "notice")} if notices else {})
    return Fault(state, rank, f"rank {rank}{says}", script)


def hang(rank: int | None, says: str, script: Script | None = None, **how: Any) -> Fault:
    return Fault("hang", rank, says, script or {}, limits={"hang_seconds": 3.0}, **how)


def stopped(says: str, *signals: signal.Signals, **how: Any) -> Fault:
    """From outside, while the ranks are deaf to SIGTERM."""
    return Fault("interrupted", None, says, DEAF, signals_to_launcher=signals, **how)


DEAF: Script = {0: (2, "ignore SIGTERM"), 1: (2, "ignore SIGTERM")}
NOTICING: Script = {0: (2, "notice"), 1: (2, "notice")}
CHILD: Script = {1: (2, "start a child")}
INT, KILL, STOP = signal.SIGINT, signal.SIGKILL, signal.SIGSTOP
BY_USER = "interrupted by the user (Ctrl-C)"

FAULTS: dict[str, Fault] = {
    **{
        f"rank {rank} dies of SIG{name}, its peer {'notices' if notices else 'waits'}": of_rank(
            rank,
            f"signal {int(signal.Signals[f'SIG{name}'])}",
            "crashed",
            f" was ended by SIG{name}",
            notices=notices,
        )
        for name, (rank, notices) in zip(
            SIGNALS, itertools.cycle(itertools.product((0, 1), (True, False))), strict=False
        )
    },
    "rank 1 dies of SIGKILL, its peer notices": of_rank(
        1, f"signal {int(KILL)}", "crashed", " was ended by SIGKILL"
    ),
    "rank 1 with a child is killed": Fault(
        "crashed", 1, "rank 1 was ended by SIGKILL", CHILD, kill_rank(1, KILL)
    ),
    "rank 0 raises": of_rank(0, "raise", "crashed", ": ValueError: scripted exception"),
    "rank 1 raises": of_rank(1, "raise", "crashed", ": ValueError: scripted exception"),
    **{
        f"rank {rank} reports {kind}": of_rank(rank, kind, kind, f": scripted {kind}")
        for rank, kind in enumerate(("out_of_memory", "nan"))
    },
    "rank 1 reports unsupported": of_rank(1, "unsupported", "unsupported", ": scripted unsup"),
    **{
        f"rank {rank} leaves with {code}": of_rank(
            rank, f"exit {code}", "crashed", f" ended with exit code {code}"
        )
        for rank, code in ((0, 1), (1, 7), (1, 255))
    },
    "both ranks end early": Fault(
        "crashed", 0, "ended without an error after 3 of 20 steps",
        {0: (4, "stop early"), 1: (4, "stop early")}, steps=20,
    ),
    "rank 1 ends early": Fault(
        "crashed", 1, "ended without an error after 19 of 20 steps", {1: (20, "stop early")},
        steps=20,
    ),
    "rank 0 never comes": hang(0, "rank 0 is behind", {0: (4, "hang")}),
    "rank 1 never comes": hang(1, "rank 1 is behind", {1: (4, "hang")}),
    "rank 0 is stopped": hang(0, "rank 0 is stopped", act=kill_rank(0, STOP)),
    "rank 1 is stopped": hang(
        1, "rank 1 is stopped", act=kill_rank(1, STOP), logged=('File "', "scripted_worker")
    ),
    "agent is stopped": hang(
        None, "starts the ranks is stopped", act=signal_agent(STOP), steps=20
    ),
    "both ranks stop stepping": hang(None, "load ", {0: (4, "hang"), 1: (4, "hang")}),
    "time limit": Fault(
        "timeout", None, "launch.timeout_seconds = 3", limits={"timeout_seconds": 3.0}
    ),
    "time limit while rank 1 never comes": Fault(
        "timeout", 1, "launch.timeout_seconds = 15", {1: (4, "hang")},
        limits={"timeout_seconds": 15.0},
    ),
    **{
        f"agent dies of {number.name}": Fault(
            "crashed", None, f"the process that starts the ranks was ended by {number.name}",
            NOTICING, signal_agent(number),
        )
        for number in (KILL, signal.SIGTERM, INT, signal.SIGHUP)
    },
    "stop is asked for": Fault("interrupted", None, "on request", act=ask_to_stop),
    "stop, and ranks ignore SIGTERM": stopped("on request", act=ask_to_stop),
    "stop, and a rank has a child in its own session": Fault(
        "interrupted", None, "on request", CHILD, ask_to_stop
    ),
    "folder is removed": Fault("removed", None, "its folder is gone", act=remove_folder),
    "launcher dies while rank 1 is stopped": stopped(
        "ended without writing how", KILL, act=kill_rank(1, STOP)
    ),
    "launcher gets Ctrl-C once": stopped(BY_USER, INT),
    "launcher gets Ctrl-C twice": stopped(BY_USER, INT, INT),
    "launcher gets Ctrl-C, then SIGKILL": stopped(BY_USER, INT, KILL),
}  # fmt: skip


def inject(store: ResultsStore, fault: Fault) -> list[str]:
    """Run it; what is wrong with what it leaves."""
    script = {str(rank): list(act) for rank, act in fault.script.items()}
    resolved = resolve_anywhere(
        RunSpec(
            train=TrainSpec(steps=fault.steps),
            launch=LaunchSpec(
                ranks=2,
                env={"MFSDP_TEST_SCRIPT": json.dumps(script)},
                **({"hang_seconds": 30.0, "timeout_seconds": 90.0} | fault.limits),
            ),
        )
    )
    folder = store.new_run(resolved, sweep="faults", cell="c", repeat=0, arm=None, code="x")
    pids: set[int] = set()
    raised, returned = "", None
    try:
        if fault.signals_to_launcher:
            folder.close()
            _in_a_launcher_of_its_own(folder, fault, pids)
        else:
            returned = _here(resolved, folder, fault, pids)
    except Exception as error:
        raised = str(error)
    left = left_behind(folder.path, pids, seconds=60.0 if fault.signals_to_launcher else 0.0)
    problems = [f"{len(left)} processes are left"] if left else []
    if fault.state != "removed":
        if returned is not None and returned != store.read(folder.run_id).status:
            problems.append("the status returned is not the one on disk")
        return [*problems, *filter(None, [raised]), *_wrong_in_record(store, folder, fault)]
    return problems + ([] if fault.says in raised else [f"raised {raised!r}"])


def _here(resolved: ResolvedRun, folder: RunFolder, fault: Fault, pids: set[int]) -> RunStatus:
    scene = Scene(folder, StopRequest())

    def on_step(step: int) -> None:
        for rank in (0, 1):
            if (folder.path / f"pid.rank{rank}").exists():
                pids.add(scene.pid(rank))
        if step >= 4 and fault.act is not None and not scene.done:
            scene.done = True
            fault.act(scene)

    return launch(
        resolved,
        folder,
        stop=scene.stop,
        on_step=on_step,
        worker_module="scripted_worker",
        limits=LIMITS,
    )


def _in_a_launcher_of_its_own(folder: RunFolder, fault: Fault, pids: set[int]) -> None:
    launcher = subprocess.Popen([sys.executable, str(HERE), str(folder.path)])
    scene = Scene(folder, StopRequest())
    try:
        _wait_for_step_4(folder.path, launcher)
        pids.update(scene.pid(rank) for rank in (0, 1))
        if fault.act is not None:
            fault.act(scene)
        for number in fault.signals_to_launcher:
            launcher.send_signal(number)
            time.sleep(0.4)
        launcher.wait(600)
    finally:
        launcher.kill()
        launcher.wait()


def _wait_for_step_4(run_dir: Path, launcher: subprocess.Popen[bytes]) -> None:
    steps = [run_dir / f"steps.node{rank}.jsonl" for rank in (0, 1)]
    deadline = time.monotonic() + 90
    while not all(path.exists() and path.read_bytes().count(b"\n") >= 4 for path in steps):
        if time.monotonic() > deadline or launcher.poll() is not None:
            raise RuntimeError(f"no rank came to step 4; the launcher: {launcher.poll()}")
        time.sleep(0.05)


def launch_alone(run_dir: Path) -> None:
    """A process that launches the run in `run_dir` and can be killed."""
    from bench.cli.interrupts import stop_on_signals
    from bench.store.file_lock import FileLock
    from bench.store.reading import read_spec, read_status

    # In a background shell it is ignored, and whoever is started inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lock = FileLock(run_dir / "owner.lock")
    lock.acquire("the launcher of a fault")
    run_id = f"{run_dir.parent.name}/{run_dir.name}"
    folder = RunFolder(run_dir, run_id, read_status(run_dir, []), lock)
    stop = StopRequest()
    limits = Limits(tick_seconds=0.1, grace_seconds=3.0)
    with stop_on_signals(stop, lambda _: None, last_seconds=5.0):
        launch(
            read_spec(run_dir), folder, stop=stop, worker_module="scripted_worker", limits=limits
        )


def _wrong_in_record(store: ResultsStore, folder: RunFolder, fault: Fault) -> list[str]:
    record = store.read(folder.run_id)
    status = record.status
    problems = [text for text in record.problems if text != "env.json is missing"]
    if status.state != fault.state:
        problems.append(f"state {status.state}, expected {fault.state}")
    if status.failed_rank != fault.rank:
        problems.append(f"names rank {status.failed_rank}, expected {fault.rank}")
    if fault.says not in status.reason:
        problems.append(f"says {status.reason!r}, expected {fault.says!r}")
    if fault.signals_to_launcher and not record.steps:
        problems.append("no sample is kept")
    log = (folder.logs_path / "rank0.log").read_text() if fault.logged else ""
    return problems + [f"{text} is not in the log" for text in fault.logged if text not in log]


def left_behind(run_dir: Path, pids: Collection[int] = (), seconds: float = 0.0) -> list[int]:
    """Processes of the run that still live then, by process id and by the folder they work for.

    They are killed, so that a failure does not disturb what runs after it.
    """
    deadline = time.monotonic() + seconds
    while (found := _left(run_dir, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def _left(run_dir: Path, pids: Collection[int]) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.pid in pids or process.environ().get(RUN_DIR_VARIABLE) == str(run_dir)
            if mine and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


if __name__ == "__main__":
    launch_alone(Path(sys.argv[1]))
