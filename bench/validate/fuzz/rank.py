"""A program on this rank, as the fork server's workers call it."""

from __future__ import annotations

import importlib
import traceback

import torch

from bench.errors import UnsupportedError
from bench.validate.fuzz.drivers.driver import Driver
from bench.validate.fuzz.program import Program
from bench.validate.fuzz.trial import Trial
from bench.validate.rank import Refused
from bench.validate.traces import say, say_event

#: Engines with a driver of their own, each in `drivers`.
DRIVEN = ("mfsdp", "fsdp2", "fsdp1", "ddp")
_CORE_ERRORS = "mfsdp_core.errors"


def driver_name(engine: str) -> str:
    """Name of the module in `drivers`."""
    return engine if engine in DRIVEN else "outside"


def run(program: Program) -> Refused | None:
    """Run `program`; the process group of its ranks exists.

    Returns:
        What the engine refuses by a typed error, or while it is built: mfsdp by its own errors,
        others by those of Python as well.

    Raises:
        DiffersError: the engine does something else than plain torch.
        Exception: whatever else the engine raises.
    """
    say("building the model")
    try:
        name = driver_name(program.engine)
        module = importlib.import_module(f"bench.validate.fuzz.drivers.{name}")
        driver: Driver = module.DRIVER(program)
        trial = Trial(program, driver, say)
        driver.follow(trial.model, say_event)
        trial.run()
    except Exception as error:
        if not _is_refusal(error, program.engine):
            raise
        return Refused(f"{type(error).__name__}: {error}")
    finally:
        # A program on the meta device sets it, and other cases follow on these ranks.
        torch.set_default_dtype(torch.float32)
    return None


def _is_refusal(error: Exception, engine: str) -> bool:
    if isinstance(error, UnsupportedError) or type(error).__module__ == _CORE_ERRORS:
        return True
    if engine != "mfsdp" and isinstance(error, ValueError | NotImplementedError):
        return True
    return any(frame.name == "shard" for frame in traceback.extract_tb(error.__traceback__))
