"""A process that has loaded torch and forks ranks from itself: a new set of them takes no import.

`python -m bench.validate.fork_server PARENT_PID DESCRIPTOR`. A request over the connection says how
many ranks to fork, where they connect, and which copy of mfsdp_core they import. The answer is
their process ids. The server itself never imports mfsdp_core and starts no thread, so that its
children can be anything. Ranks die with it, and it dies with the process that started it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from bench.launch.parent_death import die_with_parent
from bench.validate.worker_group import WorkerGroup


def main(arguments: list[str]) -> None:
    """Serve requests until the other end closes."""
    parent, descriptor = (int(argument) for argument in arguments)
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries dead ranks
    _load()
    requests = Connection(descriptor)
    requests.send("ready")
    while True:
        try:
            group: WorkerGroup = requests.recv()
        except (EOFError, OSError):
            return
        requests.send([_fork(group, rank, requests) for rank in range(group.ranks)])


def _load() -> None:
    """Import what every rank needs, and hide it from their garbage collectors."""
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.nn.parallel
    import torch.utils.checkpoint

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
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        from bench.validate.rank import serve

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
