"""What starts the runs of a sweep: this machine, or the jobs of a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.launch.hosts.hosts_file import read_hosts
from bench.launch.rank_code import checkout_root
from bench.launch.slurm.controller import ControllerSilentError
from bench.launch.slurm.nodes import node_of_cluster
from bench.launch.slurm.settings import SlurmSettings, read_profile, slurm_settings
from bench.launch.slurm.submission import JobRequest
from bench.resolve.cuda_devices import CudaDevice
from bench.resolve.machine import Machine
from bench.spec import LaunchSpec

LOCAL, SLURM, PRINT, TORCHRUN = "local", "slurm", "print", "torchrun"
LAUNCHERS = (LOCAL, SLURM, PRINT, TORCHRUN)
_UNKNOWN = 4096


@dataclass(frozen=True)
class LauncherRequest:
    """What the command line says. assignments: KEY=VALUE of `SlurmSettings`.

    hosts: file of the hosts of `torchrun`, which wait for each other for so many seconds.
    """

    name: str = LOCAL
    profile: str | None = None
    assignments: tuple[str, ...] = ()
    max_jobs: int | None = None
    hosts: Path | None = None
    hosts_seconds: float | None = None

    def settings(self, of_sweep: Mapping[str, Any]) -> SlurmSettings | None:
        """Profile, then sweep file, then command line; None where no job is asked for.

        Raises:
            UsageError: something of it cannot be.
        """
        if self.name not in LAUNCHERS:
            raise UsageError(f"--launcher {self.name}: expected one of {', '.join(LAUNCHERS)}")
        self._check_hosts()
        if self.name in {LOCAL, TORCHRUN}:
            given = self.profile or self.assignments or self.max_jobs
            if given:
                raise UsageError("--profile, --slurm and --max-jobs need --launcher slurm or print")
            return None
        options = _parsed(self.assignments)
        if self.max_jobs is not None:
            options["max_jobs"] = self.max_jobs
        return slurm_settings(
            ("the profile", read_profile(self.profile)),
            ("slurm", of_sweep),
            ("--slurm", options),
        )

    def _check_hosts(self) -> None:
        if self.name == TORCHRUN and self.hosts is None:
            raise UsageError(
                "--launcher torchrun needs --hosts FILE, a host per line; start the same command on"
                " each of them"
            )
        if self.name != TORCHRUN and (self.hosts, self.hosts_seconds) != (None, None):
            raise UsageError("--hosts and --hosts-timeout need --launcher torchrun")


def _parsed(assignments: tuple[str, ...]) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    found: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--slurm {text}: expected KEY=VALUE, as partition=gpu")
        try:
            parsed = YAML(typ="safe").load(value)
        except YAMLError:
            parsed = value
        section, _, option = key.partition(".")
        if option:
            found.setdefault(section, {})[option] = parsed
        else:
            found[key] = parsed
    return found


def machine_for(request: LauncherRequest, settings: SlurmSettings | None) -> Machine:
    """What cells are planned for: this machine, hosts like it, or a node of the cluster.

    Scripts may be written where no cluster is; then its size prunes nothing.

    Raises:
        UsageError: the controller does not answer, or the file of hosts is wrong.
    """
    if settings is None:
        nodes = 1 if request.hosts is None else len(read_hosts(request.hosts))
        return replace(Machine.detect(), nodes=nodes)
    try:
        return node_of_cluster(settings)
    except ControllerSilentError as error:
        if request.name == PRINT:
            devices = (CudaDevice("unknown"),) * _UNKNOWN
            return Machine(_UNKNOWN, 2**60, devices, hostname="cluster", nodes=_UNKNOWN)
        raise UsageError(f"the cells cannot be planned for the cluster: {error}") from error


def job_request(name: str, file: Path, launch: LaunchSpec, minutes: int) -> JobRequest:
    """What Slurm is asked for: this interpreter and this checkout, on other machines."""
    path = [str(checkout_root()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = [f"PYTHONPATH={os.pathsep.join(path)}", "PYTHONSAFEPATH=1"]
    command = ["env", *environment, sys.executable, "-m", "sweeps.job_program", str(file)]
    return JobRequest(name, file.parent, command, launch, minutes)
