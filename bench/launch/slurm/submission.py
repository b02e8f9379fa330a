"""From settings to a batch script and a submitted job array, both by submitit."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.launch.slurm.settings import SlurmSettings
from bench.spec import LaunchSpec

# Slurm's own default for MaxArraySize is 1001, which is one more than the largest array.
MAX_ARRAY = 1000


@dataclass(frozen=True)
class JobRequest:
    """Jobs alike: each runs `command`, which tells them apart by SLURM_ARRAY_TASK_ID.

    folder: on the shared file system, for the script and what the jobs print. launch: of the cells,
    which need the same nodes.
    """

    name: str
    folder: Path
    command: Sequence[str]
    launch: LaunchSpec
    time_minutes: int


def submit_array(request: JobRequest, settings: SlurmSettings, count: int) -> str:
    """Submit an array of `count` jobs; its id.

    Raises:
        UsageError: sbatch refuses, with its words.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    request.folder.mkdir(parents=True, exist_ok=True)
    try:
        executor = _executor(request, settings, count)
        return str(executor._submit_command(_command_line(request)).job_id)
    except (FailedJobError, FailedSubmissionError, OSError, RuntimeError) as error:
        raise UsageError(
            f"sbatch has not taken the jobs of {request.name}: {_last(error)}"
        ) from error


def _last(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else repr(error))


def _command_line(request: JobRequest) -> str:
    """`exec` gives the signals of Slurm to the program, not to a shell in front of it."""
    return f"exec {shlex.join(request.command)}"


def _executor(request: JobRequest, settings: SlurmSettings, count: int) -> Any:
    try:
        from submitit import SlurmExecutor
    except ImportError:
        raise UsageError(
            "--launcher slurm needs submitit: pip install 'mfsdp-bench[slurm]'"
        ) from None

    class Writer(SlurmExecutor):
        """Scripts can be written where there is no Slurm."""

        @classmethod
        def affinity(cls) -> int:
            return 1

    executor = Writer(request.folder)
    executor.update_parameters(**_parameters(request, settings))
    executor.parameters["map_count"] = count
    return executor


def _parameters(request: JobRequest, settings: SlurmSettings) -> dict[str, Any]:
    """In submitit's names."""
    launch = request.launch
    of_node = launch.ranks_per_node * launch.threads_per_rank if launch.device == "cpu" else None
    extra: dict[str, Any] = {
        "signal": f"B:USR1@{settings.signal_seconds}",
        "requeue" if settings.requeue else "no-requeue": True,
        **{name: value for name, value in settings.options.items() if value is not False},
    }
    memory = settings.memory_gb
    return {
        "job_name": request.name,
        "time": settings.time_minutes or request.time_minutes,
        "nodes": launch.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": settings.cpus_per_node or of_node,
        "gpus_per_node": launch.devices_per_node if launch.device == "cuda" else None,
        "mem": None if memory is None else f"{math.ceil(memory * 1024)}MB",
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "nodelist": settings.nodelist,
        "exclude": settings.exclude,
        "exclusive": settings.exclusive or None,
        "array_parallelism": settings.max_jobs or MAX_ARRAY,
        "wckey": None,
        "use_srun": False,
        "stderr_to_stdout": True,
        "setup": [f"module load {shlex.quote(name)}" for name in settings.modules] or None,
        "additional_parameters": extra,
    }
