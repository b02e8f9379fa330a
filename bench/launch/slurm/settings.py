"""What a user says about the jobs of a sweep: `slurm:` in its file, or a profile of the cluster.

Values reach Slurm as quoted `#SBATCH` lines and argument vectors, never through a shell's eyes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from bench.errors import UsageError
from bench.spec.names import Frozen

PROFILES = Path("mfsdp-bench") / "slurm.yaml"
DEFAULT_PROFILE = "default"
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+/-]*")
# What the launcher decides itself; set by hand, a job would not do what its record says.
_OWNED = frozenset({
    "array", "job-name", "nodes", "ntasks", "ntasks-per-node", "output", "error", "open-mode",
    "signal", "requeue", "no-requeue", "wrap", "parsable", "export",
})  # fmt: skip


class SlurmSettings(Frozen):
    """Settings of the jobs; None leaves a choice to the cluster.

    time_minutes: limit of a job; None adds up the limits of its runs. signal_seconds: how long
    before the limit the job is told, so that its record says so. requeue: whether Slurm may start a
    job again that it took the nodes from; it then goes on with what is missing. exclusive: whole
    nodes, as times need them. max_jobs: of one sweep at the same time. modules: environment modules
    to load. container_*: of pyxis, for the ranks. options: any other option of sbatch by its name.
    poll_seconds: how often a runner asks the controller.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    time_minutes: int | None = Field(default=None, ge=1)
    signal_seconds: int = Field(default=60, ge=1, le=3600)
    requeue: bool = True
    exclusive: bool = True
    max_jobs: int | None = Field(default=None, ge=1)
    cpus_per_node: int | None = Field(default=None, ge=1)
    memory_gb: float | None = Field(default=None, gt=0)
    modules: tuple[str, ...] = ()
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()
    container_python: str = "python3"
    options: dict[str, str | int | bool] = Field(default_factory=dict)
    poll_seconds: float = Field(default=10.0, ge=5.0)

    @field_validator("*")
    @classmethod
    def _one_line(cls, value: Any) -> Any:
        texts = [value] if not isinstance(value, dict | tuple) else [*value]
        texts += value.values() if isinstance(value, dict) else ()
        for text in texts:
            if isinstance(text, str) and (not text or re.search(r"[\x00-\x1f\x7f]", text)):
                raise ValueError("expected a text of one line, without control characters")
        return value

    @field_validator("modules")
    @classmethod
    def _modules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not _MODULE.fullmatch(name):
                raise ValueError(f"{name!r} is no name of an environment module, as cuda/12.8")
        return value

    @field_validator("options")
    @classmethod
    def _options(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not _OPTION.fullmatch(name):
                raise ValueError(f"{name!r} is no long option of sbatch, as reservation")
            if name in _OWNED:
                raise ValueError(f"{name} is set by the launcher itself; remove it")
        return value

    @property
    def container_arguments(self) -> list[str]:
        """For srun, where the ranks run in a container."""
        if self.container_image is None:
            return []
        mounts = [f"--container-mounts={','.join(self.container_mounts)}"]
        return [
            f"--container-image={self.container_image}",
            *(mounts if self.container_mounts else []),
        ]


def slurm_settings(*layers: tuple[str, Mapping[str, Any]]) -> SlurmSettings:
    """Settings out of layers of (where they stand, settings), the later ones on top.

    Raises:
        UsageError: an unknown key, or a value that cannot be.
    """
    merged: dict[str, Any] = {}
    for where, layer in layers:
        try:
            SlurmSettings.model_validate(layer)
        except ValidationError as error:
            raise UsageError(f"{where}: {_problem(error)}") from None
        merged |= {key: value for key, value in layer.items() if value is not None}
    return SlurmSettings.model_validate(merged)


def _problem(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"unknown key {key!r}; expected one of {', '.join(SlurmSettings.model_fields)}"
    return f"{key}: {first['msg'].removeprefix('Value error, ')}"


def read_profile(name: str | None, variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """A profile of the user's configuration; without a name the one called `default`, if any.

    Raises:
        UsageError: it is not there, or the file cannot be read.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    home = variables.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    path = Path(home) / PROFILES
    try:
        text = path.read_text(encoding="utf-8")
        profiles = YAML(typ="safe").load(text) or {}
    except FileNotFoundError:
        profiles = {}
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(profiles, dict) or not all(isinstance(p, dict) for p in profiles.values()):
        raise UsageError(f"{path}: expected profiles, as `default: {{partition: gpu}}`")
    profiles = {str(called): profile for called, profile in profiles.items()}
    if name is not None and name not in profiles:
        known = ", ".join(profiles) or "none"
        raise UsageError(f"profile {name}: not in {path}; profiles there: {known}")
    return dict(profiles.get(DEFAULT_PROFILE if name is None else name, {}))
