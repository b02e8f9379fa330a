"""A program on this rank, as the fork server's workers call it."""

from __future__ import annotations

import importlib
import traceback
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from bench.errors import UnsupportedError
from bench.testing.hang_clock import stretched
from bench.validate.fuzz.drivers.driver import Driver
from bench.validate.fuzz.program import Program
from bench.validate.fuzz.trial import DiffersError, Trial
from bench.validate.rank import Refused
from bench.validate.traces import own_last_words, say, say_event

#: Engines with a driver of their own, each in `drivers`.
DRIVEN = ("mfsdp", "fsdp2", "ddp")
_CORE_ERRORS = "mfsdp_core.errors"
#: That a rank waits for the others: one that failed, and one that did not.
_CONNECT_SECONDS, _LONGEST_SECONDS = 3.0, 300.0


def driver_name(program: Program) -> str:
    """Name of the module in `drivers`: that of the interface, where the engine has several."""
    name = str(dict(program.options).get("front", program.engine))
    return name if name in DRIVEN else "outside"


@dataclass(frozen=True)
class Differed:
    """What differs from plain torch, in a line, and where the rank was."""

    text: str
    where: tuple[str, ...]


def run(program: Program) -> Refused | Differed | None:
    """Run `program`; the process group of its ranks exists.

    Returns:
        None where all is as in plain torch; else what differs, or what the engine refuses: mfsdp by
        its own errors, others by those of Python as well, all of them while they are built.

    Raises:
        Exception: whatever else the engine raises; what differs or is refused on this rank, if the
            others do not come to an end.
    """
    say("building the model")
    try:
        name = driver_name(program)
        module = importlib.import_module(f"bench.validate.fuzz.drivers.{name}")
        driver: Driver = module.DRIVER(program)
        trial = Trial(program, driver, say)
        driver.follow(trial.model, say_event)
        trial.run()
    except Exception as error:
        answer = _answer(error, program.engine)
        if answer is None or not _all_come(_CONNECT_SECONDS):
            raise
        return answer
    finally:
        # A program on the meta device sets it, and other cases follow on these ranks.
        torch.set_default_dtype(torch.float32)
    _all_come(_LONGEST_SECONDS)
    return None


def _all_come(seconds: float) -> bool:
    """Whether every rank comes to its end, so that no collective is under way."""
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=stretched(seconds)))
    except RuntimeError:
        return False
    return True


def _answer(error: Exception, engine: str) -> Refused | Differed | None:
    if isinstance(error, DiffersError):
        return Differed(str(error), own_last_words())
    return Refused(f"{type(error).__name__}: {error}") if _is_refusal(error, engine) else None


def _is_refusal(error: Exception, engine: str) -> bool:
    if isinstance(error, UnsupportedError) or type(error).__module__ == _CORE_ERRORS:
        return True
    if engine != "mfsdp" and isinstance(error, ValueError | NotImplementedError):
        return True
    return any(frame.name == "shard" for frame in traceback.extract_tb(error.__traceback__))
