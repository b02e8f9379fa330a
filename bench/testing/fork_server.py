"""A process that has loaded torch and forks ranks from itself: a new set of them takes no import.

`python -m bench.testing.fork_server PARENT_PID DESCRIPTOR [MODULE]...`. A request over the
connection says how many ranks to fork, where they connect, and which copy of mfsdp_core they
import. The answer is their process ids. The server itself never imports mfsdp_core and starts no
thread, so that its children can be anything. Ranks die with it, and it dies with its parent.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

from bench.launch.forked_ranks import load_torch
from bench.launch.process import die_with_parent
from bench.testing.call import Reap, WorkerGroup

_ENDING_SECONDS = 2.0
_POLL_SECONDS = 0.002


def main(arguments: list[str]) -> None:
    """Serve requests until the other end closes."""
    parent, descriptor = (int(argument) for argument in arguments[:2])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _load(arguments[2:])
    serve_requests(Connection(descriptor))


def serve_requests(requests: Connection) -> None:
    """Fork what is requested until the other end closes."""
    requests.send("ready")
    while True:
        try:
            request: WorkerGroup | Reap = requests.recv()
        except (EOFError, OSError):
            return
        if isinstance(request, Reap):
            requests.send([_exit_code(pid) for pid in request.pids])
        else:
            requests.send([_fork(request, rank, requests) for rank in range(request.ranks)])


def _exit_code(pid: int) -> int:
    """How a rank ended, negative for a signal; 0 for one that was reported before.

    A rank that closed its connection and lives on is killed.
    """
    deadline = time.monotonic() + _ENDING_SECONDS
    try:
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
    except ChildProcessError:
        return 0


def _load(modules: Sequence[str]) -> None:
    """Import torch and `modules`, which ranks need, and hide them from garbage collectors."""
    load_torch()
    import torch

    for module in modules:
        importlib.import_module(module)
    torch.set_num_threads(1)
    if "mfsdp_core" in sys.modules:
        raise RuntimeError("the fork server has loaded mfsdp_core, which its ranks have to choose")
    gc.collect()
    gc.freeze()


def _fork(group: WorkerGroup, rank: int, requests: Connection) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(server)
        requests.close()
        from bench.testing.worker import serve

        serve(group, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # No orderly shutdown: it could wait for a peer that is gone.
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
