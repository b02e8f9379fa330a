"""What makes a rank a good child: it dies with its parent, and it runs the code it was told to.

Imports neither torch nor anything slow.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Final

from bench.errors import UsageError

CHECKOUT_VARIABLE: Final = "MFSDP_BENCH_CHECKOUT"
AGENT_PID_VARIABLE: Final = "MFSDP_BENCH_AGENT_PID"
_PR_SET_PDEATHSIG: Final = 1
_PACKAGES: Final = ("bench", "mfsdp_core")


def end_by_signal_alone() -> None:
    """Let SIGTERM end the process at once.

    A handler in Python would not run while the rank is blocked inside a collective, which is just
    when the launcher has to end it; the default action of the kernel does.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def die_with_parent() -> None:
    """Linux: get SIGKILL when the parent ends, however it ends; elsewhere nothing.

    The parent may have ended before the request was made. Then this process has been given to
    another parent already, and ends itself: known for certain where the launcher has put its own
    process id into MFSDP_BENCH_AGENT_PID, else by having become a child of process 1.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    expected = os.environ.get(AGENT_PID_VARIABLE)
    orphaned = os.getppid() == 1 if expected is None else os.getppid() != int(expected)
    if orphaned:
        os.kill(os.getpid(), signal.SIGKILL)


def check_checkout() -> None:
    """Refuse to measure another checkout than the one that MFSDP_BENCH_CHECKOUT names, if any.

    Looks the packages up without importing them.

    Raises:
        UsageError: a package comes from somewhere else.
    """
    named = os.environ.get(CHECKOUT_VARIABLE)
    if not named:
        return
    checkout = Path(named).resolve()
    for package in _PACKAGES:
        origin = _origin(package)
        if origin is None or not origin.is_relative_to(checkout):
            raise UsageError(
                f"this rank imports {package} from {origin or 'nowhere'}; expected it under "
                f"{checkout} ({CHECKOUT_VARIABLE}). Start the run from that checkout, or install "
                "it editable in the environment that runs it"
            )


def _origin(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve()
