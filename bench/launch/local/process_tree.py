"""Starting what starts a run, ending every process of it, and asking what state its ranks are in.

torchrun puts each rank into a session of its own, so the tree is walked by parenthood; whatever got
away (its parent died first) is found by the run folder in its environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from bench.launch.command import RUN_DIR_VARIABLE
from bench.launch.process import RANK_NAME

# A process that has got SIGKILL and is still there waits inside the kernel (a dead file server, a
# driver); waiting longer would only hang the harness too.
_KILL_WAIT_SECONDS = 10.0


def start_detached(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """In a session of its own, so that a Ctrl-C on the terminal reaches the launcher alone.

    What it prints is appended to `log`. env: the whole environment; None is that of this process.
    """
    with log.open("ab") as stream:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )


def end_run(agent: subprocess.Popen[bytes], run_dir: Path, grace_seconds: float) -> None:
    """End the agent, all its descendants, and strays of the same run; returns when they are gone.

    SIGTERM first, SIGKILL after `grace_seconds`. A KeyboardInterrupt while waiting skips the rest
    of the grace time.
    """
    try:
        _end_tree(agent, grace_seconds)
    except KeyboardInterrupt:
        _end_tree(agent, 0.0)
    _kill(_strays(run_dir))


def _end_tree(agent: subprocess.Popen[bytes], grace_seconds: float) -> None:
    ranks = descendants(agent.pid)
    if grace_seconds > 0:
        for process in ranks:
            _signal(process, signal.SIGTERM)
        if agent.poll() is None:
            agent.terminate()
        _, ranks = psutil.wait_procs(ranks, timeout=grace_seconds)
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(timeout=grace_seconds if not ranks else 0.0)
    ranks = list({*ranks, *descendants(agent.pid)})
    if agent.poll() is None:
        agent.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(timeout=_KILL_WAIT_SECONDS)
    _kill(ranks)


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below `pid`, at any depth; empty if it is gone."""
    try:
        children: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return children


def process_state(pid: int) -> str:
    """Status by psutil (`running`, `sleeping`, `stopped`, ...); "" of a process that is gone."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return ""


def rank_states(pid: int) -> dict[int, str]:
    """Status by psutil of each rank below agent `pid`; one that has ended is not listed."""
    states: dict[int, str] = {}
    for process in descendants(pid):
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            rank = rank_of(process)
            if rank is not None and process.status() != psutil.STATUS_ZOMBIE:
                states.setdefault(rank, process.status())
    return states


def rank_of(process: psutil.Process) -> int | None:
    """Rank that a process is, if any.

    A fork of the agent has the environment from before it was a rank, and a name of its own.
    """
    name = Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    if name.startswith(RANK_NAME):
        return int(name.removeprefix(RANK_NAME))
    rank = process.environ().get("RANK")
    return None if rank is None else int(rank)


def ask_for_stacks(pid: int) -> None:
    """Have every rank below the agent `pid` write its Python stacks into its log (`rank.py`)."""
    for process in descendants(pid):
        _signal(process, signal.SIGUSR1)


def _strays(run_dir: Path) -> list[psutil.Process]:
    strays = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid():
                continue
            if process.environ().get(RUN_DIR_VARIABLE) == str(run_dir):
                strays.append(process)
    return strays


def _kill(processes: Iterable[psutil.Process]) -> None:
    processes = list(processes)
    for process in processes:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=_KILL_WAIT_SECONDS)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


_COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))


def out_of_memory_kills(counters: tuple[Path, ...] = _COUNTERS) -> int:
    """Processes that the kernel has ended for lack of memory; 0 if no counter can be read.

    The largest is taken: a container's own count and the machine's include the same kills.
    """
    return max((_count(path) for path in counters), default=0)


def _count(path: Path) -> int:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return 0
