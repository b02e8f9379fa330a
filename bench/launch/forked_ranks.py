"""Ranks as forks of their agent, which has loaded torch: a start takes half the time.

torchrun starts each rank as `python -m bench.launch.rank ...`, and each would load torch again:
three seconds of processor time per rank before anything is measured. A fork has it already. Only
torch is shared. Each rank loads and proves the code that a run measures itself.

Agents of other runs are other processes, so two runs share no memory layout: a start stays a
sample of its own.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from bench.launch.process import RANK_NAME

_PR_SET_NAME = 15
_LOOK_SECONDS = 0.02


def load_torch() -> None:
    """Load the parts of torch that every rank which trains loads. None of them starts a thread.

    The garbage collector looks at what was loaded once, rather than all the time.
    """
    gc.disable()
    import torch._dynamo  # the first optimizer loads it
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.nn.parallel
    import torch.utils.checkpoint  # noqa: F401

    gc.enable()
    gc.collect()


def fork_ranks() -> None:
    """From here on, torchrun in this process forks its ranks, where it has a seam for that."""
    import torch.distributed.elastic.multiprocessing.api as elastic
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    class ForkingHandler(SubprocessHandler):
        """torchrun's own, but for how the process comes to be."""

        def _popen(self, args: Sequence[str], env: Mapping[str, str]) -> Any:
            after_the_module = args[args.index("-m") + 2 :]
            return ForkedRank(after_the_module, env)

    if hasattr(elastic, "get_subprocess_handler"):
        elastic.get_subprocess_handler = ForkingHandler


def name_callers_cheaply() -> None:
    """Have the rendezvous of torchrun name its callers by their frames alone.

    It puts the name into records that nobody reads. To find it, it looks for the source of
    everything on the stack among all loaded modules, nine times in a run: 0.25 s of processor time.
    """
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous

    if hasattr(rendezvous, "get_method_name"):
        rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


class ForkedRank:
    """What torchrun asks of a `subprocess.Popen`, of a fork of this process.

    Args:
        arguments: of `bench.launch.rank`.
        env: the whole environment.
    """

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        ready, own = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ready)
            _become_rank(self.args, env, own)
        os.close(own)
        # Its end is closed once the rank has a session of its own, to which torchrun sends signals.
        os.read(ready, 1)
        os.close(ready)

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_LOOK_SECONDS)
        return code


def _become_rank(arguments: list[str], env: Mapping[str, str], ready: int) -> NoReturn:
    try:
        os.setsid()
        os.close(ready)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        # For lists of processes: the kernel shows the agent's command line for a fork.
        name = f"{RANK_NAME}{env['RANK']}".encode()
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        from bench.launch.rank import run

        run(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
