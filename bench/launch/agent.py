"""The process between the launcher and the ranks: torch.distributed.run, tied to its parent's life.

`python -m bench.launch.agent PARENT_PID RANKS WORKER_MODULE RUN_DIR`, on every node of a run. RANKS
is the number of ranks on this node. PARENT_PID 0 means the process that started the agent. What
torchrun knows about failed ranks (rank, exit code or signal), and when each died, is written to
`logs/agent.json` (on further nodes `logs/agent.node<K>.json`). The exit code is 0 if every rank
ended with 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from bench.launch.command import WORKER_MODULE
from bench.launch.forked_ranks import fork_ranks, load_torch, name_callers_cheaply
from bench.launch.local.process_tree import ask_for_stacks, out_of_memory_kills
from bench.launch.process import AGENT_PID_VARIABLE, die_with_parent
from bench.launch.rank_entry.mfsdp_bench_rank import WORKER_VARIABLE
from bench.launch.remote_end import WATCHED_VARIABLE, RunFiles
from bench.launch.rendezvous import Rendezvous, node_number

_LOOK_SECONDS = 0.05
_CATCH_UP_SECONDS = 5.0


class Deaths:
    """When each child of this process died, watched by a thread until `expected` were seen.

    torchrun looks at its ranks a few times per second and ends the rest as soon as one has failed:
    afterwards several ranks have a signal for an exit code, in no order. A process descriptor
    becomes readable at the moment of death. On a kernel without them this stays empty.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._seconds: dict[int, float] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def of_all(self) -> dict[int, float]:
        """Process id -> Unix time of its end, once all children have ended; {} if none is known.

        Waits for the thread: on a busy machine the children may be reaped before it has run.
        """
        self._thread.join(_CATCH_UP_SECONDS)
        return dict(self._seconds)

    def _watch(self) -> None:
        poll = select.poll()
        pid_of: dict[int, int] = {}  # descriptor -> process id
        known: set[int] = set()
        # Any OSError: no descriptors on this kernel, or none left.
        with contextlib.suppress(OSError, psutil.Error, AttributeError):
            while len(known) < self._expected or pid_of:
                if len(known) < self._expected:
                    for pid in _children() - known:
                        known.add(pid)
                        descriptor = os.pidfd_open(pid)
                        pid_of[descriptor] = pid
                        poll.register(descriptor, select.POLLIN)
                wait = _LOOK_SECONDS * 1000 if len(known) < self._expected else None
                ended = poll.poll(wait)
                now = time.time()
                for descriptor, _ in ended:
                    poll.unregister(descriptor)
                    self._seconds[pid_of.pop(descriptor)] = now
                    os.close(descriptor)


def _children() -> set[int]:
    """By the kernel's own list: psutil reads about every process of the machine."""
    lists = list(Path("/proc/self/task").glob("*/children"))
    if not lists:  # a kernel without such lists
        return {child.pid for child in psutil.Process().children()}
    ranks: set[int] = set()
    for file in lists:
        with contextlib.suppress(OSError):  # of a thread that has just ended
            ranks.update(map(int, file.read_text(encoding="utf-8").split()))
    return ranks


OUTCOME_FILE = "agent.json"
OUTCOME_GLOB = "agent*.json"

# torchrun asks the kernel about its children this often. Ten times per second is its default; a
# failed rank is noticed soon enough at five, and during a measurement less is better.
_MONITOR_INTERVAL_SECONDS = 0.2


def main(arguments: list[str]) -> int:
    """Start the ranks and wait for them."""
    parent, ranks, worker_module, run_dir = arguments
    die_with_parent(int(parent) or os.getppid())
    os.environ[AGENT_PID_VARIABLE] = str(os.getpid())
    if os.environ.get(WATCHED_VARIABLE):
        files = RunFiles(Path(run_dir))
        threading.Thread(target=files.watch, args=(_ask_for_stacks,), daemon=True).start()
    rendezvous, node = Rendezvous.from_environment(), node_number()
    where = ["--standalone", "--local-addr=127.0.0.1"]
    if rendezvous is None:
        return _run(int(ranks), worker_module, Path(run_dir), where, OUTCOME_FILE)
    # A launcher on another node can ask for stacks only through the agent.
    signal.signal(signal.SIGUSR1, lambda *_: _ask_for_stacks())
    interface = rendezvous.interface()
    if interface is not None and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    where = rendezvous.torchrun_arguments(node)
    return _run(int(ranks), worker_module, Path(run_dir), where, node_file(OUTCOME_FILE, node))


def node_file(name: str, node: int) -> str:
    """Of several nodes each has its own: `agent.json`, `agent.node1.json`."""
    return name.replace(".", f".node{node}.", 1) if node else name


def _ask_for_stacks() -> None:
    ask_for_stacks(os.getpid())


def _run(ranks: int, worker_module: str, run_dir: Path, where: list[str], file: str) -> int:
    # With CUDA, ranks load their libraries themselves: a fork of what has loaded them never ran.
    forks = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if forks and os.environ.get(WORKER_VARIABLE) == WORKER_MODULE:
        load_torch()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    name_callers_cheaply()
    if forks:
        fork_ranks()
    # --standalone lets both the rendezvous and the process group take ports that the kernel found
    # free; --local-addr keeps them on this machine, whatever its host name resolves to.
    scratch = run_dir / "logs" / f"torchrun.{file}"
    arguments = [
        *where,
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        f"--monitor-interval={_MONITOR_INTERVAL_SECONDS}",
        # Without this, torchrun leaves a folder in /tmp behind for every run.
        f"--log-dir={scratch}",
        "--module",
        "bench.launch.rank",
        worker_module,
        str(run_dir),
    ]
    deaths, kills_before = Deaths(ranks), out_of_memory_kills()
    outcome: dict[str, Any] = {"failures": [], "signal": None}
    code = 0
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        code = 1
        died = deaths.of_all()
        outcome["failures"] = [
            {
                "rank": rank,
                "exit_code": failure.exitcode,
                "pid": failure.pid,
                "died_seconds": died.get(failure.pid),
            }
            for rank, failure in error.failures.items()
        ]
    except SignalException as error:
        outcome["signal"] = int(error.sigval)
        # It ended its ranks at once, while peers elsewhere still had to notice.
        outcome["signal_seconds"] = min(deaths.of_all().values(), default=time.time())
        code = 128 + error.sigval
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    outcome["kernel_oom_kills"] = out_of_memory_kills() - kills_before
    try:
        (run_dir / "logs" / file).write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"cannot write {file}: {error}\n")
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch's modules apart takes 0.9 s of processor time, in every run
