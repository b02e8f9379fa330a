"""NCCL's own log, one file per rank, for runs with `measure.nccl: evidence`.

NCCL_DEBUG_FILE has no placeholder for a rank, and process ids repeat in containers, so each rank
gets its own value before NCCL is loaded. A file is also the only form in which NCCL writes line by
line; a pipe gets blocks, cut and glued.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

from bench.spec import ResolvedRun
from bench.store.layout import NCCL

SUBSYSTEMS: Final = "INIT,ENV,TUNING,REG,COLL,ALLOC"
WANTED_VARIABLE: Final = "MFSDP_BENCH_NCCL_LOGS"


def nccl_variables(resolved: ResolvedRun) -> dict[str, str]:
    """What all ranks share. Nothing on CPU, where there is no NCCL."""
    if resolved.measure.nccl == "none" or resolved.launch.device == "cpu":
        return {}
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": SUBSYSTEMS, WANTED_VARIABLE: "1"}


def give_nccl_a_log(run_dir: Path, rank: int, environment: MutableMapping[str, str]) -> None:
    """Point the NCCL of this rank to `nccl/rank<N>.log` if the run wants one."""
    if environment.get(WANTED_VARIABLE) != "1":
        return
    path = nccl_log(run_dir, rank)
    path.parent.mkdir(exist_ok=True)
    # NCCL expands %h and %p, and reads %% as %.
    environment["NCCL_DEBUG_FILE"] = str(path).replace("%", "%%")


def nccl_log(run_dir: Path, rank: int) -> Path:
    """Where NCCL writes."""
    return run_dir / NCCL / f"rank{rank}.log"
