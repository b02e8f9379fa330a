"""What starts the runs of a sweep, by name: this machine, jobs of a cluster, or your own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from bench.errors import UsageError, first_problem
from bench.launch.code import checkout_root
from bench.launch.command_launcher import SSH, CommandLauncher
from bench.launch.hosts_file import read_hosts
from bench.launch.local.launcher import LocalLauncher
from bench.launch.protocol import Launcher
from bench.launch.slurm.controller import ControllerSilentError
from bench.launch.slurm.nodes import node_of_cluster
from bench.launch.slurm.settings import SlurmSettings, read_profile, slurm_settings
from bench.launch.slurm.submission import JobRequest
from bench.resolve.import_path import load, problem_of
from bench.resolve.machine import Machine
from bench.spec import LaunchSpec
from sweeps.suggest import did_you_mean

_OF_JOBS = ("--profile", "--slurm", "--max-jobs")
LOCAL = "local"


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

    settings: a model of what `--launcher-option KEY=VALUE` may say. takes: other options of the
    command line that mean something to it. machine: of the settings, what cells are planned for.
    start: of the settings, what starts the processes of a run (`bench.launch.protocol.Launcher`).
    shares_machine: its runs may be packed on this machine.
    jobs: runs are made by jobs of a cluster.
    elsewhere: settings of runs go to other machines by a file, so that none may be a credential.
    """

    settings: type[BaseModel] = NoSettings
    takes: tuple[str, ...] = ()
    machine: Callable[[Any], Machine] = lambda _: Machine.detect()
    start: Callable[[Any], Launcher] = lambda _: LocalLauncher()
    shares_machine: bool = False
    jobs: bool = False
    elsewhere: bool = False


LAUNCHERS: dict[str, LauncherKind] = {
    "local": LauncherKind(shares_machine=True),
    "slurm": LauncherKind(SlurmSettings, _OF_JOBS, _node_of_cluster, jobs=True),
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


@dataclass(frozen=True)
class LauncherRequest:
    """What the command line says. assignments: KEY=VALUE of `--launcher-option`."""

    name: str = LOCAL
    profile: str | None = None
    slurm: tuple[str, ...] = ()
    max_jobs: int | None = None
    assignments: tuple[str, ...] = ()

    @property
    def kind(self) -> LauncherKind:
        """Raises UsageError where there is none of that name."""
        return launcher_kind(self.name)

    def settings(self, of_sweep: Mapping[str, Any]) -> BaseModel:
        """Profile, then sweep file, then command line.

        Raises:
            UsageError: something of it cannot be.
        """
        kind = self.kind
        self._check_options(kind)
        options = _parsed("--launcher-option", self.assignments) | _parsed("--slurm", self.slurm)
        if kind.settings is not SlurmSettings:
            return _validated(kind.settings, options)
        if self.max_jobs is not None:
            options["max_jobs"] = self.max_jobs
        return slurm_settings(
            ("the profile", read_profile(self.profile)),
            ("slurm", of_sweep),
            ("--slurm", options),
        )

    def _check_options(self, kind: LauncherKind) -> None:
        given = {
            "--profile": self.profile,
            "--slurm": self.slurm or None,
            "--max-jobs": self.max_jobs,
        }
        for option, value in given.items():
            if value is not None and option not in kind.takes:
                others = [name for name, one in LAUNCHERS.items() if option in one.takes]
                raise UsageError(f"{option} needs --launcher {' or '.join(others)}")


def _validated(model: type[BaseModel], options: Mapping[str, Any]) -> BaseModel:
    given = {key: value for key, value in options.items() if value is not None}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        known = ", ".join(model.model_fields) or "none"
        raise UsageError(
            f"--launcher-option {first_problem(error)}; options of this launcher: {known}"
        ) from None


def _parsed(option: str, assignments: tuple[str, ...]) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    found: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"{option} {text}: expected KEY=VALUE, as partition=gpu")
        try:
            parsed = YAML(typ="safe").load(value)
        except YAMLError:
            parsed = value
        section, _, rest = key.partition(".")
        if rest:
            found.setdefault(section, {})[rest] = parsed
        else:
            found[key] = parsed
    return found


def job_request(name: str, file: Path, launch: LaunchSpec, minutes: int) -> JobRequest:
    """What Slurm is asked for: this interpreter and this checkout, on other machines."""
    path = [str(checkout_root()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = [f"PYTHONPATH={os.pathsep.join(path)}", "PYTHONSAFEPATH=1"]
    command = ["env", *environment, sys.executable, "-m", "sweeps.job_program", str(file)]
    return JobRequest(name, file.parent, command, launch, minutes)
