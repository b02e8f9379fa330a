"""A case or a program on this rank, as the fork server's workers call it."""

from __future__ import annotations

import importlib
import re
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from bench.engines.registry import engine_factory
from bench.errors import UnsupportedError
from bench.spec import known_engine
from bench.testing.hang_clock import stretched
from bench.validate.cases import Case
from bench.validate.observation import Seen
from bench.validate.program import Program
from bench.validate.scenario import run_case
from bench.validate.traces import own_last_words, say, say_event
from bench.validate.trial import DiffersError, Trial

_CORE_ERRORS = "mfsdp_core.errors"
#: That a rank waits for the others: one that failed, and one that did not.
_CONNECT_SECONDS, _LONGEST_SECONDS = 3.0, 300.0


@dataclass(frozen=True)
class Outcome:
    """How it ended.

    kind: `ended` (a case, to be judged), `equal` (a program, to plain torch), `differs` (from it),
    `refused` (on all ranks), `raised` (an exception), `died`, `hung` or `not_run`.
    answers: of all ranks, in order, of a case that ended. For the other kinds, of the rank that
    says most: rank, text in a line, and where it was, in lines. seconds: of the call.
    """

    kind: Literal["ended", "equal", "differs", "refused", "raised", "died", "hung", "not_run"]
    answers: tuple[Any, ...] = ()
    rank: int | None = None
    text: str = ""
    where: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def failed(self) -> bool:
        """Of a program: neither as in plain torch nor refused in words."""
        return self.kind not in ("equal", "refused")

    @property
    def lines(self) -> tuple[str, ...]:
        """What went wrong, then where that was."""
        by = f"rank {self.rank} " if self.kind == "died" else ""
        return (f"{by}{self.text}", *self.where)

    @property
    def signature(self) -> str:
        """Equal for programs that fail in the same way: the text without names and numbers."""
        if self.kind == "hung":
            return self.kind
        words = re.sub(r"\S*\d\S*|\S*\.\S*|'[^']*'", "", self.lines[0])
        return " ".join([self.kind, *words.split()[:8]])


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


def run(case: Case | Program, device: str = "cpu") -> Seen | Outcome:
    """Run it; the process group of its ranks exists. What was seen of a case, or the refusal.

    Returns:
        Of a program `equal`, what differs, or what the engine refuses: mfsdp by its own errors,
        others by those of Python as well, all of them while they are built.

    Raises:
        Exception: whatever else the engine raises; what differs or is refused in a program on this
            rank, if the others do not come to an end.
    """
    if isinstance(case, Program):
        return _run_program(case)
    index = "" if device == "cpu" else f":{torch.cuda.current_device()}"
    try:
        return run_case(case, dist.get_rank(), torch.device(f"{device}{index}"))
    except UnsupportedError as refusal:
        return Outcome("refused", text=refusal.reason)


def _run_program(program: Program) -> Outcome:
    say("building the model")
    try:
        module = importlib.import_module(f"bench.validate.drivers.{program.driver}")
        trial = Trial(program, module.DRIVER(program), say)
        trial.driver.follow(trial.model, say_event)
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
    return Outcome("equal")


def _all_come(seconds: float) -> bool:
    """Whether every rank comes to its end, so that no collective is under way."""
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=stretched(seconds)))
    except RuntimeError:
        return False
    return True


def _answer(error: Exception, engine: str) -> Outcome | None:
    if isinstance(error, DiffersError):
        return Outcome("differs", text=str(error), where=own_last_words())
    kinds = () if engine == "mfsdp" else (ValueError, NotImplementedError)
    is_refusal = (
        isinstance(error, (UnsupportedError, *kinds))
        or type(error).__module__ == _CORE_ERRORS
        or any(frame.name == "shard" for frame in traceback.extract_tb(error.__traceback__))
    )
    return Outcome("refused", text=f"{type(error).__name__}: {error}") if is_refusal else None
