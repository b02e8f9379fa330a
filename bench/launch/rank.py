"""First code of every rank: ties it to the agent's life, gives it a log file, runs the worker.

`python -m bench.launch.rank WORKER_MODULE RUN_DIR`, started by torch.distributed.run. The worker
module then runs as `python -m WORKER_MODULE RUN_DIR` would. SIGUSR1 writes the Python stacks of all
threads into the log: the launcher asks for them before it ends a rank that hangs. Torch-free.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final, Literal, NoReturn

from bench.errors import UnsupportedError
from bench.launch.process import (
    AGENT_PID_VARIABLE,
    die_with_parent,
    end_by_signal_alone,
    print_into,
)
from bench.store.atomic import write_json_atomically
from bench.store.layout import FAILURE, nccl_log, rank_file

NCCL_LOGS_VARIABLE: Final = "MFSDP_BENCH_NCCL_LOGS"
FailureKind = Literal["out_of_memory", "nan", "unsupported", "crashed"]

# Classes are recognised by name: torch and the loop may be what could not be imported.
_KIND_BY_CLASS: Final[dict[str, FailureKind]] = {
    "OutOfMemoryError": "out_of_memory",
    "MemoryError": "out_of_memory",
    "NonFiniteLossError": "nan",
}
# torch's CPU allocator, cuBLAS, cuDNN and NCCL make torch raise a plain RuntimeError.
_OUT_OF_MEMORY_WORDS: Final = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "failed to cuda calloc",
)


def failure_kind(error: BaseException) -> FailureKind:
    """Class of a failure; `crashed` is everything that is not one of the known kinds."""
    for base in type(error).__mro__:
        if base.__name__ in _KIND_BY_CLASS:
            return _KIND_BY_CLASS[base.__name__]
    if isinstance(error, UnsupportedError | NotImplementedError):
        return "unsupported"
    message = str(error).lower()
    if isinstance(error, RuntimeError) and any(word in message for word in _OUT_OF_MEMORY_WORDS):
        return "out_of_memory"
    return "crashed"


def write_failure(run_dir: Path, rank: int, error: BaseException) -> None:
    """Write `failure.rank<N>.json`; by `time_seconds` (Unix) a reader finds who failed first."""
    document = {
        "kind": failure_kind(error),
        "message": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        "rank": rank,
        "time_seconds": time.time(),
    }
    write_json_atomically(run_dir / rank_file(FAILURE, rank), document)


def give_nccl_a_log(run_dir: Path, rank: int, environment: MutableMapping[str, str]) -> None:
    """Point the NCCL of this rank to `nccl/rank<N>.log` if the run wants one, before it is loaded.

    NCCL_DEBUG_FILE has no placeholder for a rank, and process ids repeat in containers. A file is
    also the only form in which NCCL writes line by line; a pipe gets blocks, cut and glued.
    """
    if environment.get(NCCL_LOGS_VARIABLE) != "1":
        return
    path = nccl_log(run_dir, rank)
    path.parent.mkdir(exist_ok=True)
    # NCCL expands %h and %p, and reads %% as %.
    environment["NCCL_DEBUG_FILE"] = str(path).replace("%", "%%")


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
