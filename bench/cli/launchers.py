"""What starts the runs of a sweep, by name: this machine, jobs of a cluster, or your own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from bench.cli.options import LOCAL
from bench.errors import UsageError, first_problem
from bench.launch.code import checkout_root
from bench.launch.command_launcher import SSH, CommandLauncher, read_hosts
from bench.launch.local.launcher import LocalLauncher
from bench.launch.protocol import Launcher
from bench.launch.slurm.controller import ControllerSilentError
from bench.launch.slurm.nodes import node_of_cluster
from bench.launch.slurm.settings import (
    DEFAULT_PROFILE,
    SlurmSettings,
    read_profile,
    slurm_settings,
)
from bench.launch.slurm.submission import JobRequest
from bench.resolve.import_path import load, problem_of
from bench.resolve.machine import Machine
from bench.spec import LaunchSpec
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


def _node_of_cluster(settings: SlurmSettings) -> Machine:
    try:
        return node_of_cluster(settings)
    except ControllerSilentError as error:
        raise UsageError(f"the cells cannot be planned for the cluster: {error}") from error


@dataclass(frozen=True)
class LauncherKind:
    """One way of making runs. What is needed to add one is here, and nowhere else.

    settings: a model of what `--launcher-option KEY=VALUE` may say. machine: of the settings, what
    cells are planned for. start: of the settings, what starts the processes of a run
    (`bench.launch.protocol.Launcher`).
    jobs: runs are made by jobs of a cluster.
    elsewhere: settings of runs go to other machines by a file, so that none may be a credential.
    """

    settings: type[BaseModel] = NoSettings
    machine: Callable[[Any], Machine] = lambda _: Machine.detect()
    start: Callable[[Any], Launcher] = lambda _: LocalLauncher()
    jobs: bool = False
    elsewhere: bool = False


LAUNCHERS: dict[str, LauncherKind] = {
    LOCAL: LauncherKind(),
    "slurm": LauncherKind(SlurmSettings, machine=_node_of_cluster, jobs=True),
    "command": LauncherKind(
        CommandSettings,
        machine=_like_this_one,
        start=lambda settings: CommandLauncher(read_hosts(settings.hosts), settings.command),
        elsewhere=True,
    ),
}
"""By the name that `--launcher` takes. Somebody else's is named by its import path instead."""


def launcher_kind(name: str) -> LauncherKind:
    """The kind of this name, or at the import path `package.module:NAME`.

    Raises:
        UsageError: there is none.
    """
    if name in LAUNCHERS:
        return LAUNCHERS[name]
    known = f"expected one of {', '.join(LAUNCHERS)}, or package.module:NAME of your own"
    if ":" not in name:
        raise UsageError(f"--launcher {name}: {known}{did_you_mean(name, LAUNCHERS)}")
    problem = problem_of(name)
    if problem is not None:
        raise UsageError(f"--launcher {name}: {problem}")
    found = load(name)
    if not isinstance(found, LauncherKind):
        raise UsageError(f"--launcher {name}: expected a LauncherKind there, found {found!r}")
    return found


def launcher_settings(
    kind: LauncherKind, assignments: Sequence[str], of_sweep: Mapping[str, Any]
) -> BaseModel:
    """KEY=VALUE of `--launcher-option`; of jobs on top of a profile and of the sweep file.

    Raises:
        UsageError: something of it cannot be.
    """
    options = _parsed(assignments)
    if kind.settings is SlurmSettings:
        named = "profile" in options
        profile = options.pop("profile", None)
        if named and not isinstance(profile, str):
            raise UsageError(
                f"{_OPTION} profile: expected the name of a profile, as profile=debug, found"
                f" {profile!r}; without this option it is the one called {DEFAULT_PROFILE}, if any"
            )
        return slurm_settings(
            ("the profile", read_profile(profile)),
            ("slurm", of_sweep),
            (_OPTION, options),
        )
    try:
        return kind.settings.model_validate(options)
    except ValidationError as error:
        known, problem, hint = list(kind.settings.model_fields), first_problem(error), ""
        if error.errors()[0]["type"] == "extra_forbidden":
            name = str(error.errors()[0]["loc"][0])
            problem, hint = f"{name}: there is no such option", did_you_mean(name, known)
        listed = ", ".join(known) or "none"
        raise UsageError(f"{_OPTION} {problem}; options of this launcher: {listed}{hint}") from None


def _parsed(assignments: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"{_OPTION} {text}: expected KEY=VALUE, as partition=gpu")
        section, _, rest = key.partition(".")
        inside = found.setdefault(section, {}) if rest else found
        if not isinstance(inside, dict):
            raise UsageError(
                f"{_OPTION} {text}: expected {section} to be a section, found {inside!r} given to"
                f" it before; leave one of them out"
            )
        inside[rest or key] = yaml_value(value)
    return found


def job_request(name: str, file: Path, launch: LaunchSpec, minutes: int) -> JobRequest:
    """What Slurm is asked for: this interpreter and this checkout, on other machines."""
    path = [str(checkout_root()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = [f"PYTHONPATH={os.pathsep.join(path)}", "PYTHONSAFEPATH=1"]
    command = ["env", *environment, sys.executable, "-m", "sweeps.job_program", str(file)]
    return JobRequest(name, file.parent, command, launch, minutes)
