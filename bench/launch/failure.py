"""Why a rank failed, as a file for the launcher to read: `failure.rank<N>.json`. Torch-free."""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import Final, Literal

from bench.errors import UnsupportedError
from bench.store.atomic import write_json_atomically
from bench.store.layout import FAILURE, rank_file

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
    """Write the file. `time_seconds` (Unix time) lets a reader find the rank that failed first."""
    document = {
        "kind": failure_kind(error),
        "message": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        "rank": rank,
        "time_seconds": time.time(),
    }
    write_json_atomically(run_dir / rank_file(FAILURE, rank), document)
