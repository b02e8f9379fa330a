"""What makes a rank a good child: it cannot outlive who started it, and ends on request.

Imports nothing slow.

[Note: death of the launcher]

    launcher --> agent --> rank 0, rank 1 ...      each arrow: the child asks the kernel for SIGKILL
                                                   at the death of its parent (PR_SET_PDEATHSIG)

No handler runs in a process that gets SIGKILL, so only the kernel can end what it started. torchrun
gives each rank a session of its own, so a signal to a process group would not reach them either.
The request does not survive a fork, so agent and rank each make it as their first act. A parent
that died before the request leaves the child with another parent, which is checked afterwards.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Final

AGENT_PID_VARIABLE: Final = "MFSDP_BENCH_AGENT_PID"
#: A rank that is a fork goes by this and its number among processes: it has no command of its own.
RANK_NAME: Final = "rank"
_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_parent: int) -> None:
    """Have the kernel send SIGKILL when the parent dies; exit now if it is already gone.

    Args:
        expected_parent: process id of the parent that this process was started by.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != expected_parent:
        os._exit(1)


def end_by_signal_alone() -> None:
    """Let SIGTERM and SIGINT end the process at once.

    A handler in Python would not run while the rank is blocked inside a collective, which is just
    when the launcher has to end it; the default action of the kernel does. A KeyboardInterrupt
    would also unwind through a broken process group first, and the death would be its peers' fault.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def print_into(path: Path) -> None:
    """Send what this process prints, from Python or from C, to `path`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 77` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
