"""The command line and the environment of the agent and its ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from bench.launch.code import RankCode, named_folders
from bench.launch.protocol import Order
from bench.launch.rank import NCCL_LOGS_VARIABLE
from bench.launch.rank_entry import mfsdp_bench_rank as rank_entry
from bench.spec import ResolvedRun

WORKER_MODULE = "bench.worker"
RUN_DIR_VARIABLE = "MFSDP_BENCH_RUN_DIR"

#: Left over when the harness itself was started by torchrun or by a job step: they would make the
#: new agent join a group that is not its own.
_FOREIGN = re.compile(
    r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|PET)_.*"
)
#: Several ranks on one device: NCCL 2.30 or later, few channels each, and no NVLS.
SHARED_DEVICE = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "NCCL_NVLS_ENABLE": "0",
}


def agent_command(order: Order, parent: int | None = None) -> list[str]:
    """Argument vector of the agent of a node.

    Its parent is this process unless `parent` says otherwise (0: the process that starts it). Agent
    and ranks run the order's code, but each rank first runs a module of this harness.
    """
    return [
        order.code.python,
        "-m",
        "bench.launch.agent",
        str(os.getpid() if parent is None else parent),
        str(order.resolved.launch.ranks_per_node),
        rank_entry.__name__.rpartition(".")[2],
        str(order.run_dir),
    ]


def rank_environment(order: Order, inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment of the agent and the ranks: inherited, then the harness's, then the run's own."""
    kept = {name: value for name, value in inherited.items() if not _FOREIGN.fullmatch(name)}
    return kept | launch_variables(order, inherited)


def launch_variables(order: Order, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the launch adds to the inherited environment."""
    resolved, launch = order.resolved, order.resolved.launch
    threads = str(launch.threads_per_rank)
    added = {
        # This checkout, and not a folder named `bench` in the user's current folder.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": python_path(order.code, inherited, named_folders(resolved)),
        RUN_DIR_VARIABLE: str(order.run_dir),
        rank_entry.WORKER_VARIABLE: order.worker_module,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }
    if launch.device == "cpu":
        added["CUDA_VISIBLE_DEVICES"] = ""
        if launch.nodes == 1:
            # gloo resolves the host name to find its interface, which fails on machines whose name
            # resolves to nothing; all ranks are on this one. Between nodes, the agents know it.
            added["GLOO_SOCKET_IFNAME"] = inherited.get("GLOO_SOCKET_IFNAME", "lo")
    else:
        added |= nccl_library({**inherited, **launch.env})
    if launch.ranks_per_device > 1:
        added |= SHARED_DEVICE
    added |= launch.nccl_variables
    return added | launch.env | nccl_variables(resolved)


def nccl_variables(resolved: ResolvedRun) -> dict[str, str]:
    """For evidence, the log of every rank. Nothing on CPU, where there is no NCCL."""
    if resolved.measure.nccl == "none" or resolved.launch.device == "cpu":
        return {}
    subsystems = "INIT,ENV,TUNING,REG,COLL,ALLOC"
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": subsystems, NCCL_LOGS_VARIABLE: "1"}


def nccl_library(variables: Mapping[str, str]) -> dict[str, str]:
    """NCCL_LIB names the libnccl that ranks load, in the place of torch's own."""
    library = variables.get("NCCL_LIB")
    if not library:
        return {}
    others = variables.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library}:{others}" if others else library}


def python_path(code: RankCode, inherited: Mapping[str, str], folders: Iterable[str] = ()) -> str:
    """PYTHONPATH of the ranks: the arm's own packages, its checkout, the entry, then the rest.

    folders: those of code that the run names by its import path.
    """
    entry = Path(rank_entry.__file__).resolve().parent
    before = (*(str(path) for path in code.paths), str(code.root), str(entry))
    return os.pathsep.join(filter(None, (*before, inherited.get("PYTHONPATH"), *folders)))
