"""Processes that cannot outlive the one that started them, even when that one gets SIGKILL.

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
