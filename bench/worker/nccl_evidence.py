"""What a rank adds to NCCL's log of an evidence run: where iterations end, and which groups exist.

The end of an iteration is noted as an offset into the log, so that no clock decides which line
belongs to which iteration: the host has read the loss by then, so every collective of the iteration
has been enqueued and its line written (NCCL writes its file line by line or without a buffer).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, Self

import torch.distributed as dist

from bench.spec import ResolvedRun
from bench.store.atomic import write_json_atomically
from bench.store.layout import NCCL, nccl_log

# Names that torch gives to the groups of a mesh, by the names of its dimensions.
_ROLES: Final = {
    "mesh_dp": "inner",
    "mesh_dp_outer": "outer",
    "mesh_hsdp": "inner and outer",
    "mesh_expt_dp": "expert",
    "mesh_tp": "tensor parallel",
}


class NcclEvidence:
    """Marks and groups of one rank."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._log = nccl_log(run_dir, rank)
        self._marks = run_dir / NCCL / f"iterations.rank{rank}.jsonl"
        self._groups = run_dir / NCCL / f"groups.rank{rank}.json"
        self._marks.parent.mkdir(exist_ok=True)

    @classmethod
    def of(cls, resolved: ResolvedRun, run_dir: Path, rank: int) -> Self | None:
        """For a run that wants evidence and has NCCL, else None."""
        if resolved.measure.nccl == "none" or resolved.launch.device == "cpu":
            return None
        return cls(run_dir, rank)

    def after_step(self, step: int) -> None:
        """Note that iteration `step` ends at the present end of NCCL's log."""
        try:
            offset_bytes = self._log.stat().st_size
        except FileNotFoundError:
            offset_bytes = 0
        with self._marks.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"iteration": step, "offset_bytes": offset_bytes}) + "\n")

    def record_groups(self, resolved: ResolvedRun) -> None:
        """Write role and global ranks of every process group that this rank is in.

        A role that no mesh names is `inner` for the group of all ranks of a run without an outer
        axis, else what torch calls the group.
        """
        world = dist.distributed_c10d._world
        groups = []
        for group, name in world.pg_names.items():
            ranks = sorted(world.pg_group_ranks.get(group, {}))
            described = str(getattr(group, "group_desc", "") or name)
            role = _ROLES.get(described)
            if role is None and len(ranks) == dist.get_world_size():
                role = "inner" if resolved.engine.outer_size == 1 else "all ranks"
            groups.append({"role": role or described, "ranks": ranks, "torch_name": described})
        write_json_atomically(self._groups, {"groups": groups})
