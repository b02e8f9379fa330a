"""One case on this rank, as the fork server's workers call it: what was seen, or the refusal."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.engines.registry import engine_factory
from bench.errors import UnsupportedError
from bench.spec import known_engine
from bench.validate.cases import Case
from bench.validate.observation import Seen
from bench.validate.scenario import run_case


@dataclass(frozen=True)
class Refused:
    """The engine cannot do the case, by its own account."""

    reason: str


def prepare() -> None:
    """Memory that nobody has written is NaN, so that whoever reads it shows."""
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = True


def load(engine: str) -> None:
    """Import its factory.

    Raises:
        ConfigError: its module has no such function. Whatever its module raises.
    """
    engine_factory(known_engine(engine))


def run(case: Case, device: str) -> Seen | Refused:
    """Run `case`; the process group of its ranks exists."""
    rank = dist.get_rank()
    where = (
        torch.device("cpu")
        if device == "cpu"
        else torch.device(device, torch.cuda.current_device())
    )
    try:
        return run_case(case, rank, where)
    except UnsupportedError as refusal:
        return Refused(refusal.reason)
