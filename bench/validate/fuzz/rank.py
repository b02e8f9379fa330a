"""A program on this rank, as the fork server's workers call it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from bench.errors import UnsupportedError
from bench.testing.load_clock import stretched
from bench.validate.fuzz.diagnosis import Progress, core_frames, wrap

_CORE_ERRORS = "mfsdp_core.errors"


#: After which a rank that failed no longer waits for the others, on an idle machine.
_CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class Ended:
    """How the program ended on this rank, if not well.

    kind: `refused` by a typed error or while it was built, `differs` from plain torch, or `raised`.
    text: the failure in a line, then where it was.
    """

    kind: Literal["refused", "differs", "raised"]
    text: str


def run(source: str, engine: str) -> Ended | None:
    """Execute a script of `bench.validate.fuzz.script`; the process group of its ranks exists.

    engine: of the program; mfsdp has to refuse by its own errors, others by those of Python.

    Raises:
        Exception: that of the program, if the other ranks do not come to an end.
    """
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, "program", "exec"), names)  # noqa: S102 - text that `script` has made
    ended, progress = None, wrap(names)
    try:
        names["main"]()
    except Exception as error:
        ended = _ended(error, engine, progress)
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=stretched(_CONNECT_SECONDS)))
        except RuntimeError:
            raise error from None
    else:
        dist.monitored_barrier(timeout=timedelta(seconds=300))
    finally:
        # A program on the meta device sets it, and other cases follow on these ranks.
        torch.set_default_dtype(torch.float32)
    return ended


def _ended(error: Exception, engine: str, progress: Progress) -> Ended:
    text = f"{type(error).__name__}: {error}"
    while_built = any(f.name == "shard" for f in traceback.extract_tb(error.__traceback__))
    typed = isinstance(error, UnsupportedError) or type(error).__module__ == _CORE_ERRORS
    if engine != "mfsdp":
        typed |= isinstance(error, ValueError | NotImplementedError)
    beside = "\n".join(["", *core_frames(error.__traceback__), *progress.told()])
    if while_built or typed:
        return Ended("refused", text + beside)
    if isinstance(error, AssertionError) and str(error).startswith("cycle "):
        return Ended("differs", str(error) + beside)
    return Ended("raised", text + beside)
