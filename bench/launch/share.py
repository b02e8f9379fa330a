"""The part of a machine that a run may use while others use the rest. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Literal

CORES_VARIABLE: Final = "MFSDP_BENCH_CORES"
_VARIABLES: Final = {"cores": CORES_VARIABLE, "devices": "CUDA_VISIBLE_DEVICES"}


@dataclass(frozen=True)
class Share:
    """Cores of the CPU by number, or devices as CUDA_VISIBLE_DEVICES names them."""

    kind: Literal["cores", "devices"]
    names: tuple[str, ...]

    def variables(self) -> dict[str, str]:
        """For the environment of the agent."""
        return {_VARIABLES[self.kind]: ",".join(self.names)}


def keep_to_share() -> None:
    """Bind this process, and all that it will start, to the cores of its share, if it has one."""
    cores = os.environ.get(CORES_VARIABLE)
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
