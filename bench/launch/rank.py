"""First code of every rank: ties it to the agent's life, gives it a log file, runs the worker.

`python -m bench.launch.rank WORKER_MODULE RUN_DIR`, started by torch.distributed.run. The worker
module then runs as `python -m WORKER_MODULE RUN_DIR` would. SIGUSR1 writes the Python stacks of all
threads into the log: the launcher asks for them before it ends a rank that hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from bench.launch.nccl_logs import give_nccl_a_log
from bench.launch.process import (
    AGENT_PID_VARIABLE,
    die_with_parent,
    end_by_signal_alone,
    print_into,
)


def main(arguments: list[str]) -> None:
    """Run the worker; an exception becomes a failure file."""
    worker_module, run_dir = arguments
    die_with_parent(int(os.environ[AGENT_PID_VARIABLE]))
    end_by_signal_alone()
    rank = int(os.environ["RANK"])
    print_into(Path(run_dir) / "logs" / f"rank{rank}.log")
    give_nccl_a_log(Path(run_dir), rank, os.environ)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.argv = [worker_module, run_dir]
    try:
        runpy.run_module(worker_module, run_name="__main__", alter_sys=True)
    except Exception as error:
        from bench.launch.failure import write_failure

        # The folder may be what failed (a full disk); the exit code still says that the run failed.
        with contextlib.suppress(Exception):
            write_failure(Path(run_dir), rank, error)
        raise


def run(arguments: list[str]) -> NoReturn:
    """`main`, then the end of the process: after a failure a shutdown could wait for its group."""
    code = 1
    try:
        main(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    run(sys.argv[1:])
