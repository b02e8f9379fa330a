"""What a rank has issued, in a file, once it has issued nothing for a while.

Ranks that disagree about a collective wait for each other. gloo raises in the end, and the error
says in which unit. NCCL's watchdog ends the process from a thread of its own, and nobody gets to
say anything any more. So a thread that sleeps looks at the count of collectives, which the engine
keeps anyway; where it stands still, it writes down the last ones, before anybody gives up. The
launcher compares the ranks' files (`bench.launch.desync`).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any, Final, Self

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from bench.store.atomic import write_json_atomically

_LOOK_SECONDS: Final = 2.0
#: Collectives that a file names: more than ranks are apart on a device, whose host runs ahead.
_NAMED: Final = 512


class CollectiveLog:
    """Writes `path` while the block runs; an engine that counts no collectives leaves none."""

    def __init__(self, engine: Any, path: Path, look_seconds: float = _LOOK_SECONDS) -> None:
        self._engine = engine
        self._path = path
        self._look_seconds = look_seconds
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="collective-log", daemon=True)

    def __enter__(self) -> Self:
        if hasattr(self._engine, "latest_collectives"):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()

    def _watch(self) -> None:
        before, is_written = -1, False
        while not self._ends.wait(self._look_seconds):
            issued = self._engine.issued()
            if issued == before and not is_written:
                # The rank may issue again just now: then it does not stand still.
                with contextlib.suppress(RuntimeError, OSError):
                    self._write(issued)
                    is_written = True
            elif issued != before and is_written:
                self._path.unlink(missing_ok=True)
                is_written = False
            before = issued

    def _write(self, issued: int) -> None:
        document = {
            "issued": issued,
            "seconds": time.time(),
            "latest": self._engine.latest_collectives(_NAMED),
            "unfinished": _unfinished(),
        }
        write_json_atomically(self._path, document)


def _unfinished() -> str:
    """The oldest collective that NCCL has not ended, by its flight recorder; "" if unknown."""
    dump = getattr(c10d, "_dump_fr_trace_json", getattr(c10d, "_dump_nccl_trace_json", None))
    if dump is None or not dist.is_initialized() or "nccl" not in dist.get_backend():
        return ""
    try:
        entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
        first = min(entries, key=lambda entry: entry["record_id"], default=None)
        if first is None:
            return ""
        group, number = first["process_group"][-1], first["collective_seq_id"]
        return f"{first['profiling_name']} {number} of {group}, {first['input_sizes']}"
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError):
        return ""
