"""The command line and the environment of the agent and its ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import bench
from bench.launch.nccl_logs import nccl_variables
from bench.spec import ResolvedRun
from bench.worker.process import CHECKOUT_VARIABLE

RUN_DIR_VARIABLE = "MFSDP_BENCH_RUN_DIR"

# Left over when the harness itself was started by torchrun or by a job step: they would make the
# new agent join a group that is not its own.
_FOREIGN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_FOREIGN_PREFIXES = ("TORCHELASTIC_", "PET_")


def checkout_root() -> Path:
    """The folder that holds the packages this process runs from."""
    return Path(bench.__file__).resolve().parent.parent


def agent_command(resolved: ResolvedRun, run_dir: Path, worker_module: str) -> list[str]:
    """Argument vector of the agent; its parent is this process."""
    return [
        sys.executable,
        "-m",
        "bench.launch.agent",
        str(os.getpid()),
        str(resolved.launch.ranks),
        worker_module,
        str(run_dir),
    ]


def rank_environment(
    resolved: ResolvedRun, run_dir: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Environment of the agent and the ranks: inherited, then the harness's, then the run's own."""
    variables = {
        name: value
        for name, value in inherited.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
    }
    return variables | launch_variables(resolved, run_dir, inherited)


def launch_variables(
    resolved: ResolvedRun, run_dir: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """What the launch adds to the inherited environment."""
    root = str(checkout_root())
    threads = str(resolved.launch.threads_per_rank)
    added = {
        # This checkout, and not a folder named `bench` where the user happens to stand.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (root, inherited.get("PYTHONPATH")))),
        CHECKOUT_VARIABLE: root,
        RUN_DIR_VARIABLE: str(run_dir),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }
    if resolved.launch.device == "cpu":
        added["CUDA_VISIBLE_DEVICES"] = ""
        # gloo resolves the host name to find its interface, which fails on machines whose name
        # resolves to nothing; all ranks are on this one.
        added["GLOO_SOCKET_IFNAME"] = inherited.get("GLOO_SOCKET_IFNAME", "lo")
    return added | resolved.launch.env | nccl_variables(resolved)
