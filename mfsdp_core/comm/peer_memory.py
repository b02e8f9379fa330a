"""Reading the memory of another process of this host, in one copy (Linux, `process_vm_readv`).

The kernel permits it to processes of one user unless something stricter is set up: Yama's
`ptrace_scope`, a seccomp filter, a container of its own. `permit` lifts Yama's first level for this
process: processes of the same user may then read it, as they may where there is no Yama.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import Any

import torch

_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


class _Stretch(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


@cache
def _library() -> Any:
    """The C library, with errno kept per thread. Every call lets other threads run."""
    return ctypes.CDLL(None, use_errno=True)


def is_known() -> bool:
    """Whether this system has the call at all."""
    return sys.platform == "linux" and hasattr(_library(), "process_vm_readv")


def permit() -> None:
    """Let other processes of this user read this one, where Yama would keep them to children."""
    _library().prctl(_SET_PTRACER, _ANY, 0, 0, 0)


def read(pid: int, address: int, into: torch.Tensor) -> None:
    """Fill `into`, which is contiguous and on the CPU, from `address` on of process `pid`.

    Raises:
        OSError: the process is gone, its memory is not there, or reading it is not permitted.
    """
    target, left = into.data_ptr(), into.nbytes
    while left:
        here, there = _Stretch(target, left), _Stretch(address, left)
        count = _library().process_vm_readv(
            pid, ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), 0
        )
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"reading process {pid}: {os.strerror(number)}")
        target, address, left = target + count, address + count, left - count
