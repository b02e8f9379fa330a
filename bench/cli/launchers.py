"""What starts the runs of a sweep, by name: this machine, an allocation of Slurm, or your own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from bench.errors import UsageError, first_problem
from bench.launch.command_launcher import SSH, CommandLauncher, read_hosts
from bench.launch.local.launcher import LocalLauncher
from bench.launch.protocol import Launcher
from bench.launch.slurm import SlurmLauncher, allocated_nodes
from bench.resolve.import_path import load, problem_of
from bench.resolve.machine import Machine
from sweeps.selection import yaml_value
from sweeps.suggest import did_you_mean

_OPTION = "--launcher-option"


class NoSettings(BaseModel):
    """Of a launcher that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CommandSettings(NoSettings):
    """Of hosts of one's own: their file, and how a command is started there."""

    hosts: Path
    command: str = SSH


def _like_this_one(settings: CommandSettings) -> Machine:
    return replace(Machine.detect(), nodes=len(read_hosts(settings.hosts)))


@dataclass(frozen=True)
class LauncherKind:
    """One way of making runs.

    settings: a model of what `--launcher-option KEY=VALUE` may say. machine: of the settings, what
    cells are planned for. start: of the settings, what starts the processes of a run
    (`bench.launch.protocol.Launcher`).
    elsewhere: settings of runs go to other machines by a file, so that none may be a credential.
    """

    settings: type[BaseModel] = NoSettings
    machine: Callable[[Any], Machine] = lambda _: Machine.detect()
    start: Callable[[Any], Launcher] = lambda _: LocalLauncher()
    elsewhere: bool = False


LAUNCHERS: dict[str, LauncherKind] = {
    "local": LauncherKind(),
    "slurm": LauncherKind(
        machine=lambda _: replace(Machine.detect(), nodes=allocated_nodes()),
        start=lambda _: SlurmLauncher(),
    ),
    "command": LauncherKind(
        CommandSettings,
        machine=_like_this_one,
        start=lambda settings: CommandLauncher(read_hosts(settings.hosts), settings.command),
        elsewhere=True,
    ),
}
"""By the name that `--launcher` takes. Somebody else's is named by its import path instead."""


def _kind(name: str) -> LauncherKind:
    """Of this name, or at the import path `package.module:NAME`."""
    if name in LAUNCHERS:
        return LAUNCHERS[name]
    known = f"expected one of {', '.join(LAUNCHERS)}, or package.module:NAME of your own"
    if ":" not in name:
        raise UsageError(f"--launcher {name}: {known}{did_you_mean(name, LAUNCHERS)}")
    problem = problem_of(name)
    if problem is not None:
        raise UsageError(f"--launcher {name}: {problem}")
    kind = load(name)
    if not isinstance(kind, LauncherKind):
        raise UsageError(f"--launcher {name}: expected a LauncherKind there, found {kind!r}")
    return kind


def read_launcher(name: str, assignments: Sequence[str]) -> tuple[LauncherKind, BaseModel]:
    """What `--launcher` names, and its settings: KEY=VALUE of `--launcher-option`.

    Raises:
        UsageError: there is no such launcher, or something of its settings cannot be.
    """
    kind = _kind(name)
    options = _parsed(assignments)
    try:
        return kind, kind.settings.model_validate(options)
    except ValidationError as error:
        known, problem, hint = list(kind.settings.model_fields), first_problem(error), ""
        if error.errors()[0]["type"] == "extra_forbidden":
            name = str(error.errors()[0]["loc"][0])
            problem, hint = f"{name}: there is no such option", did_you_mean(name, known)
        listed = ", ".join(known) or "none"
        raise UsageError(f"{_OPTION} {problem}; options of this launcher: {listed}{hint}") from None


def _parsed(assignments: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"{_OPTION} {text}: expected KEY=VALUE, as hosts=hosts.txt")
        section, _, rest = key.partition(".")
        inside = options.setdefault(section, {}) if rest else options
        if not isinstance(inside, dict):
            raise UsageError(
                f"{_OPTION} {text}: expected {section} to be a section, found {inside!r} given to"
                f" it before; leave one of them out"
            )
        inside[rest or key] = yaml_value(value)
    return options
