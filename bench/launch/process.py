"""What makes a rank a good child: it ends when told to, and it runs the code it was told to run.

Imports neither torch nor anything slow.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Final

from bench.errors import UsageError

CHECKOUT_VARIABLE: Final = "MFSDP_BENCH_CHECKOUT"
AGENT_PID_VARIABLE: Final = "MFSDP_BENCH_AGENT_PID"
#: A rank that is a fork goes by this and its number among processes: it has no command of its own.
RANK_NAME: Final = "rank"
_PACKAGES: Final = ("bench", "mfsdp_core")


def end_by_signal_alone() -> None:
    """Let SIGTERM and SIGINT end the process at once.

    A handler in Python would not run while the rank is blocked inside a collective, which is just
    when the launcher has to end it; the default action of the kernel does. A KeyboardInterrupt
    would also unwind through a broken process group first, and the death would be its peers' fault.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def parent_process_id() -> int:
    """The process that this rank must not outlive: the agent, or whoever started it by hand."""
    named = os.environ.get(AGENT_PID_VARIABLE)
    return os.getppid() if named is None else int(named)


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
