"""`make faults`: 100 injected faults, and what their records say.

Each fault is one run with the real launcher, the real agent and scripted ranks. Counted are records
that are lost or unreadable, processes that are left, and a wrong process named as the
cause. Exit code 0 if all three are zero and every state is the expected one.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.launch import Limits, launch
from bench.launch.command import RUN_DIR_VARIABLE
from bench.launch.stop_request import StopRequest
from bench.resolve.resolution import resolve_anywhere
from bench.spec import LaunchSpec, ResolvedRun, RunSpec, TrainSpec
from bench.store import ResultsStore, RunFolder

HERE = Path(__file__).resolve()
ENDLESS = 100_000
LIMITS = Limits(tick_seconds=0.1, grace_seconds=1.0, startup_allowance_seconds=60.0)
AT_ONCE = 3

Script = dict[int, tuple[int, str]]
Act = Callable[["Scene"], None]
# Those whose default action ends a process and that nobody here listens to.
SIGNALS = (
    "ABRT", "ALRM", "BUS", "FPE", "HUP", "ILL", "INT", "KILL", "QUIT", "SEGV", "TERM", "USR2",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One fault, and what the record must say. rank: the cause, None for no rank."""

    kind: str
    name: str
    states: tuple[str, ...]
    rank: int | None
    says: str
    script: Script = field(default_factory=dict)
    act: Act | None = None
    steps: int = ENDLESS
    limits: dict[str, float] = field(default_factory=dict)
    signals_to_launcher: tuple[signal.Signals, ...] = ()
    record_survives: bool = True


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


@dataclass
class Result:
    """What came of a fault."""

    fault: Fault
    problems: list[str] = field(default_factory=list)
    lost: bool = False
    orphans: int = 0
    wrong_rank: bool = False
    reason: str = ""
    state: str = ""


def kill_rank(rank: int, number: signal.Signals) -> Act:
    return lambda scene: os.kill(scene.pid(rank), number)


def signal_agent(number: signal.Signals) -> Act:
    return lambda scene: scene.agent().send_signal(number)


def ask_to_stop(scene: Scene) -> None:
    scene.stop.set()


def remove_folder(scene: Scene) -> None:
    scene.folder.path.rename(scene.folder.path.with_name("removed"))


def death_by_signal() -> list[Fault]:
    found = []
    for name, rank, notices in itertools.product(SIGNALS, (0, 1), (True, False)):
        number = signal.Signals[f"SIG{name}"]
        script: Script = {rank: (4, f"signal {int(number)}")}
        if notices:
            script[1 - rank] = (2, "notice")
        peer = "peer reports a lost connection" if notices else "peer waits"
        says = f"rank {rank} was ended by SIG{name}"
        fault = Fault(
            "rank dies by a signal", f"SIG{name}, rank {rank}, {peer}", ("crashed",), rank, says,
            script,
        )  # fmt: skip
        found.append(fault)
    for name, rank in itertools.product(("TERM", "INT", "KILL", "ABRT"), (0, 1)):
        number = signal.Signals[f"SIG{name}"]
        found.append(
            Fault(
                "rank is killed from outside", f"SIG{name} to rank {rank}", ("crashed",), rank,
                f"rank {rank} was ended by SIG{name}", {1 - rank: (2, "notice")},
                kill_rank(rank, number),
            )
        )  # fmt: skip
    return found


def failing_ranks() -> list[Fault]:
    found = []
    for rank, step in itertools.product((0, 1), (2, 5, 20)):
        script: Script = {rank: (step, "raise"), 1 - rank: (2, "notice")}
        says = f"rank {rank}: ValueError: scripted exception"
        name = f"exception, rank {rank}, step {step}"
        found.append(Fault("rank raises", name, ("crashed",), rank, says, script, steps=20))
    for rank, kind in itertools.product((0, 1), ("out_of_memory", "nan", "unsupported")):
        script = {rank: (4, kind), 1 - rank: (2, "notice")}
        says = f"rank {rank}: scripted {kind}"
        found.append(Fault("rank reports", f"{kind}, rank {rank}", (kind,), rank, says, script))
    for rank, code in itertools.product((0, 1), (1, 7, 255)):
        script = {rank: (4, f"exit {code}"), 1 - rank: (2, "notice")}
        says = f"rank {rank} ended with exit code {code}"
        name = f"exit code {code}, rank {rank}"
        found.append(Fault("rank leaves silently", name, ("crashed",), rank, says, script))
    for rank in (0, 1):
        script = {0: (4, "stop early"), 1: (4, "stop early")} if rank == 0 else {
            1: (20, "stop early")
        }  # fmt: skip
        says = f"rank {rank} ended without an error after {3 if rank == 0 else 19} of 20 steps"
        name = f"ends early, rank {rank}"
        fault = Fault("rank leaves silently", name, ("crashed",), rank, says, script, steps=20)
        found.append(fault)
    return found


def hangs() -> list[Fault]:
    short = {"hang_seconds": 3.0}
    kind = "hang or time limit"
    found = [
        Fault(
            kind, f"rank {rank} never comes", ("hang",), rank, f"rank {rank} is behind",
            {rank: (4, "hang")}, limits=short,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    found += [
        Fault(
            kind, f"SIGSTOP to rank {rank}", ("hang",), rank, f"rank {rank} is stopped",
            act=kill_rank(rank, signal.SIGSTOP), limits=short,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    return [
        *found,
        Fault(
            kind, "SIGSTOP to the agent", ("hang",), None, "starts the ranks is stopped",
            act=signal_agent(signal.SIGSTOP), limits=short, steps=20,
        ),
        Fault(
            kind, "both ranks stop stepping", ("hang",), None, "load ",
            {0: (4, "hang"), 1: (4, "hang")}, limits=short,
        ),
        Fault(
            kind, "time limit", ("timeout",), None, "launch.timeout_seconds = 15",
            limits={"timeout_seconds": 15.0},
        ),
        Fault(
            kind, "time limit while rank 1 never comes", ("timeout",), 1,
            "launch.timeout_seconds = 15", {1: (4, "hang")}, limits={"timeout_seconds": 15.0},
        ),
    ]  # fmt: skip


def agents_and_launchers() -> list[Fault]:
    lost_peers: Script = {0: (2, "notice"), 1: (2, "notice")}
    found = [
        Fault(
            "agent dies", f"SIG{name} to the agent", ("crashed",), None,
            f"the process that starts the ranks was ended by SIG{name}", lost_peers,
            signal_agent(signal.Signals[f"SIG{name}"]),
        )
        for name in ("KILL", "TERM", "INT", "HUP", "QUIT", "ABRT", "SEGV")
    ]  # fmt: skip
    kind = "run is stopped"
    ignoring: Script = {0: (2, "ignore SIGTERM"), 1: (2, "ignore SIGTERM")}
    child: Script = {1: (2, "start a child")}
    found += [
        Fault(kind, "on request", ("interrupted",), None, "on request", act=ask_to_stop),
        Fault(
            kind, "ranks ignore SIGTERM", ("interrupted",), None, "on request", ignoring,
            ask_to_stop,
        ),
        Fault(
            kind, "a rank has a child in its own session", ("interrupted",), None, "on request",
            child, ask_to_stop,
        ),
        Fault(
            "rank is killed from outside", "SIGKILL to a rank with a child", ("crashed",), 1,
            "rank 1 was ended by SIGKILL", child, kill_rank(1, signal.SIGKILL),
        ),
        Fault(
            "folder is removed", "while the run goes on", ("removed",), None, "its folder is gone",
            act=remove_folder, record_survives=False,
        ),
    ]  # fmt: skip
    for name, signals, says in (
        ("SIGKILL", (signal.SIGKILL,), "ended without writing how"),
        ("Ctrl-C once", (signal.SIGINT,), "interrupted by the user (Ctrl-C)"),
        ("Ctrl-C twice", (signal.SIGINT, signal.SIGINT), "interrupted by the user (Ctrl-C)"),
        ("Ctrl-C, then SIGKILL", (signal.SIGINT, signal.SIGKILL), "the user (Ctrl-C)"),
    ):
        found.append(
            Fault(
                "launcher is signalled", name, ("interrupted",), None, says, ignoring,
                signals_to_launcher=signals,
            )
        )  # fmt: skip
    return found


def faults() -> list[Fault]:
    return [*death_by_signal(), *failing_ranks(), *hangs(), *agents_and_launchers()]


def inject(store: ResultsStore, fault: Fault) -> Result:
    """Run it, and judge what is left."""
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
    result = Result(fault)
    folder = store.new_run(resolved, sweep="faults", cell="c", repeat=0, arm=None, code="x")
    pids: set[int] = set()
    try:
        if fault.signals_to_launcher:
            folder.close()
            _in_a_launcher_of_its_own(folder.path, fault.signals_to_launcher, pids)
        else:
            _here(resolved, folder, fault, pids)
    except Exception as error:
        result.reason = str(error)
        if fault.record_survives:
            result.problems.append(f"raised {error!r}")
    _judge(store, folder, result, pids)
    return result


def _here(resolved: ResolvedRun, folder: RunFolder, fault: Fault, pids: set[int]) -> None:
    scene = Scene(folder, StopRequest())

    def on_step(step: int) -> None:
        for rank in (0, 1):
            if (folder.path / f"pid.rank{rank}").exists():
                pids.add(scene.pid(rank))
        if step >= 4 and fault.act is not None and not scene.done:
            scene.done = True
            fault.act(scene)

    launch(
        resolved,
        folder,
        stop=scene.stop,
        on_step=on_step,
        worker_module="scripted_worker",
        limits=LIMITS,
    )


def _in_a_launcher_of_its_own(
    run_dir: Path, signals: tuple[signal.Signals, ...], pids: set[int]
) -> None:
    launcher = subprocess.Popen([sys.executable, str(HERE), "--launch", str(run_dir)])
    try:
        _wait_for_step_4(run_dir, launcher)
        pids.update(int((run_dir / f"pid.rank{rank}").read_text()) for rank in (0, 1))
        for number in signals:
            launcher.send_signal(number)
            time.sleep(0.4)
        launcher.wait(60)
    finally:
        launcher.kill()
        launcher.wait()
    time.sleep(1.0 if signal.SIGKILL in signals else 0.0)  # the kernel's own SIGKILL to the ranks


def _wait_for_step_4(run_dir: Path, launcher: subprocess.Popen[bytes]) -> None:
    steps = [run_dir / f"steps.rank{rank}.jsonl" for rank in (0, 1)]
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


def _judge(store: ResultsStore, folder: RunFolder, result: Result, pids: set[int]) -> None:
    fault = result.fault
    result.orphans = len(_left(folder.path, pids))
    if result.orphans:
        result.problems.append(f"{result.orphans} processes are left")
    if not fault.record_survives:
        result.state = fault.states[0]
    else:
        try:
            record = store.read(folder.run_id)
        except Exception as error:
            result.lost = True
            result.problems.append(f"record lost: {error}")
            return
        status = record.status
        result.state, result.reason = status.state, status.reason
        if record.problems and set(record.problems) - {"env.json is missing"}:
            result.lost = True
            result.problems += record.problems
        if status.state not in fault.states:
            result.problems.append(f"state {status.state}, expected {' or '.join(fault.states)}")
        if status.failed_rank != fault.rank:
            result.wrong_rank = True
            result.problems.append(f"names rank {status.failed_rank}, expected {fault.rank}")
    if fault.says not in result.reason:
        result.wrong_rank = True
        result.problems.append(f"says {result.reason!r}, expected {fault.says!r}")


def _left(run_dir: Path, pids: set[int]) -> list[int]:
    """Processes of the run that still live, by process id and by the folder they work for."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.pid in pids or process.environ().get(RUN_DIR_VARIABLE) == str(run_dir)
            if mine and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def table(results: list[Result]) -> str:
    """Per kind of fault: how many, which states, what was wrong, and one reason."""
    by_kind: dict[str, list[Result]] = defaultdict(list)
    for one in results:
        by_kind[one.fault.kind].append(one)
    lines = []
    for kind, group in by_kind.items():
        states = ", ".join(sorted({one.state for one in group}))
        right = sum(not one.wrong_rank for one in group)
        lines.append(f"{kind}: {len(group)} faults, {states}; right rank {right}/{len(group)}")
        lines.append(f"    for example {group[0].fault.name}: {group[0].reason[:170]}")
        lines += [f"    WRONG {one.fault.name}: {'; '.join(one.problems)}" for one in group
                  if one.problems]  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    """Inject all faults."""
    # In a background shell it is ignored, and whoever is started inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[3]), str(HERE.parent / "workers")])
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [fault for fault in faults() if wanted in f"{fault.kind}: {fault.name}"]
    begun = time.monotonic()
    printing = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as scratch:
        store = ResultsStore.open(Path(scratch) / "results", create=True)

        def one(fault: Fault) -> Result:
            result = inject(store, fault)
            with printing:
                mark = f"WRONG ({'; '.join(result.problems)})" if result.problems else "ok"
                sys.stderr.write(f"{fault.kind}: {fault.name}: {mark}\n")
            return result

        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = list(pool.map(one, chosen))
        unreadable = len(store.outlines()[1])
    lost = sum(result.lost for result in results) + unreadable
    orphans = sum(result.orphans for result in results)
    wrong_ranks = sum(result.wrong_rank for result in results)
    wrong = sum(bool(result.problems) for result in results)
    sys.stdout.write(
        f"{table(results)}\n{len(results)} faults in {time.monotonic() - begun:.0f} s: {lost} lost"
        f" records, {orphans} orphans, {wrong_ranks} wrong rank, {wrong} with anything wrong\n"
    )
    return 1 if wrong or lost else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--launch"]:
        launch_alone(Path(sys.argv[2]))
    else:
        sys.exit(main())
