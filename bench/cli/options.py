"""How a verb says what it takes, and the options that several verbs share. Imports little.

A verb is a class: its fields are arguments and options, its text is its help. `bench.cli.app`
makes the parser of it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import typer

from bench.cli.completion import offer_definitions, offer_kept
from bench.errors import UsageError

DEFAULT_RESULTS = Path("results")
LOCAL = "local"
T = TypeVar("T")


class Verb(NamedTuple):
    """takes: the class of its request. runs: `module.function` of `bench.cli`."""

    name: str
    takes: type[Any]
    runs: str
    examples: tuple[str, ...]


VERBS: list[Verb] = []
"""All that there are, once `bench.cli.verbs` is imported."""


class _Parameter(NamedTuple):
    default: Any
    typer: Any


def option(flag: str, help: str, default: Any = None, **limits: Any) -> Any:
    """A field that is an option; `flag` is `--name METAVAR`, or `--name` for a switch."""
    name, _, metavar = flag.partition(" ")
    return _Parameter(default, typer.Option(name, metavar=metavar or None, help=help, **limits))


def argument(
    metavar: str,
    help: str,
    default: Any = dataclasses.MISSING,
    offer: Callable[..., list[str]] | None = None,
) -> Any:
    """A field that is an argument, required where there is no default. offer: for the tab key."""
    return _Parameter(default, typer.Argument(metavar=metavar, help=help, autocompletion=offer))


@dataclass_transform(kw_only_default=True, frozen_default=True)
def request(takes: type[T]) -> type[T]:
    """A frozen dataclass whose fields are parameters, or classes that hold some."""
    for name, value in list(vars(takes).items()):
        if isinstance(value, _Parameter):
            field = dataclasses.field(default=value.default, metadata={"typer": value.typer})
            setattr(takes, name, field)
    return dataclasses.dataclass(frozen=True, kw_only=True)(takes)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def verb(name: str, runs: str, *examples: str) -> Callable[[type[T]], type[T]]:
    """The class is what the verb `name` takes; `runs`, imported when it runs, answers it."""

    def register(takes: type[T]) -> type[T]:
        made = request(takes)
        VERBS.append(Verb(name, made, runs, examples))
        return made

    return register


SWEEP = argument(
    "SWEEP",
    "A sweep file, or the name of a sweep that comes with the tool.",
    offer=offer_definitions,
)
SWEEP_IDS = argument("SWEEP", "Sweep ids; all if left out.", (), offer_kept)
RESULTS = option("--results FOLDER", "The results folder.", DEFAULT_RESULTS)
ARMS = option(
    "--arm NAME=WHAT",
    "One side of a comparison; give two or more. WHAT is a git ref, . (the working tree), or pairs"
    " git: repo: checkout: python: packages: with commas between.",
    (),
)
BUDGET = option("--budget TIME", "Add blocks of the arms for so long, as 10m or 90s.")
POLICY = option("--policy FILE.yaml", "Tolerances and requirements.")


@request
class CellsRequest:
    """Settings of all cells of a sweep, and which cells are wanted."""

    assignments: tuple[str, ...] = option(
        "--set PATH=VALUE", "Fix a setting in every cell, as train.steps=50.", ()
    )
    only: tuple[str, ...] = option(
        "--only EXPR", "Keep matching cells only: KEY=PATTERN[|PATTERN][,...].", ()
    )
    skip: tuple[str, ...] = option("--skip EXPR", "Leave matching cells out.", ())


@request
class LauncherRequest:
    """What makes the runs. options: KEY=VALUE."""

    name: str = option(
        "--launcher NAME",
        "Where runs are made: local, in the allocation of this Slurm job (slurm), or on hosts that"
        " a command reaches (command). A launcher of your own is package.module:NAME.",
        LOCAL,
    )
    options: tuple[str, ...] = option(
        "--launcher-option KEY=VALUE", "A setting of the launcher, as hosts=hosts.txt.", ()
    )


@request
class SweepRequest:
    """What the command line says about a sweep."""

    sweep: Path = SWEEP
    cells: CellsRequest = CellsRequest()
    repeat: int | None = option("--repeat N", "Runs of each cell.", min=1, max=1000)
    arms: tuple[str, ...] = ARMS
    interleave: bool = option("--interleave", "Run the arms in turn, block by block.", False)
    launcher: LauncherRequest = LauncherRequest()


@request
class MachineRequest:
    """A machine that is not this one."""

    device: str | None = option("--device NAME", "Plan for GPUs of this name, as H100.")
    gpus: int | None = option("--gpus N", "So many of --device, 8 in a node.", min=1, max=4096)


_MINUTE = 60
_HOUR = 3600
_SPAN = re.compile(r"(?:(\d+)\s*h)?\s*(?:(\d+)\s*m(?:in)?)?\s*(?:(\d+)\s*s)?")


def duration(seconds: float) -> str:
    """A span of time for people: `48 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        minutes, rest = divmod(whole, _MINUTE)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / _MINUTE), _MINUTE)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def parsed_seconds(text: str, option: str) -> float:
    """Seconds of `10m`, `90s`, `1h30m`.

    Raises:
        UsageError: anything else, or no time at all.
    """
    found = _SPAN.fullmatch(text.strip())
    hours, minutes, seconds = (int(part or 0) for part in (found.groups() if found else (0, 0, 0)))
    total = float(hours * _HOUR + minutes * _MINUTE + seconds)
    if total <= 0:
        raise UsageError(f"{option}: expected a time such as 10m, 90s or 1h30m, found {text!r}")
    return total
