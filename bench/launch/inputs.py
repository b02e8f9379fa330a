"""What a run reads that neither its settings nor its own code tell: by path and SHA-256.

Ranks list the modules that they imported from outside of the environment
(`rank_entry/mfsdp_bench_rank.py`); the launcher adds the data (`run`). A finished run counts only
while all of it is what it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from stat import S_ISDIR

from bench.errors import UsageError
from bench.record import RunStatus, code_with_inputs

_ABSENT = "absent"


def code_now(code: str, status: RunStatus) -> str:
    """The identity that a run has today which reads what that of `status` did, with `code`."""
    return code_with_inputs(code, {path: digest_now(path) for path in status.inputs})


def changed_inputs(inputs: Mapping[str, str]) -> list[str]:
    """Files and folders that are not what they were when a run read them."""
    return [path for path, digest in inputs.items() if digest_now(path) != digest]


def digest_now(path: str) -> str:
    """SHA-256 of a file, or of what ranks read of a folder; `absent` where nothing can be read."""
    try:
        state = Path(path).stat()
    except OSError:
        return _ABSENT
    if S_ISDIR(state.st_mode):  # whose stamp does not change with the files in it
        return _digest.__wrapped__(path)
    return _digest(path, state.st_mtime_ns, state.st_size, state.st_ino)


@lru_cache(maxsize=4096)
def _digest(path: str, *_stamp: int) -> str:
    from bench.data.source import corpus_bytes

    try:
        return hashlib.sha256(corpus_bytes(Path(path))).hexdigest()
    except UsageError:
        return _ABSENT
