"""A pool of gloo ranks that outlives single tests, so that one launch serves many cases.

The pool's ranks form a world of `WORLD` processes. Data-parallel groups of 1, 2 and 4 ranks are cut
out of it as the inner axis of a mesh ("replica", "dp"): with `dp` = 2 the two halves of the world
work on the same case at the same time. A test sends a function; every rank runs it and sends back
what it returned. A rank that raises, dies or outlives the time limit ends the pool's ranks (a
half-finished collective leaves gloo unusable); the next call starts new ones.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.testing.workers import ForkServer, Workers, WorkersError

WORLD = 4
GROUP_SIZES = (1, 2, 4)

#: One or more ranks raised, died or hung; the message holds what each of them said.
RankFailureError = WorkersError

_meshes: dict[int, DeviceMesh] = {}


def mesh(group_size: int) -> DeviceMesh:
    """In a rank: the mesh whose `dp` axis has `group_size` ranks; both axes are named."""
    return _meshes[group_size]


@cache
def two_axes() -> tuple[DeviceMesh, Any]:
    """In a rank: the world as two outer by two inner ranks, and the group over both axes."""
    axes = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("outer", "inner"))
    return axes, axes["outer", "inner"]._flatten("outer_inner").get_group()


def enter_world() -> None:
    """In a new rank: warnings are errors, and the meshes of all group sizes exist."""
    warnings.simplefilter("error")
    for size in GROUP_SIZES:
        _meshes[size] = init_device_mesh(
            "cpu", (WORLD // size, size), mesh_dim_names=("replica", "dp")
        )


class RankPool:
    """Starts its ranks at the first `run`, ends them at `close` or at the first failure."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._workers: Workers | None = None

    def run(
        self, function: Callable[..., Any], *arguments: Any, seconds: float = 60.0
    ) -> list[Any]:
        """Runs `function(*arguments)` on all ranks, returns the results in rank order.

        `function` is a module-level function of a test file or of this package.
        """
        if self._workers is None:
            self._server = ForkServer(paths=tuple(filter(None, sys.path))).__enter__()
            self._workers = Workers(self._server, WORLD, prepare=enter_world)
        return self._workers.run(function, *arguments, seconds=seconds)

    @property
    def pids(self) -> list[int]:
        """Process ids of the living ranks; empty when none is started."""
        return [] if self._workers is None else self._workers.pids

    def close(self) -> None:
        """Ends every rank, and the process that forks them."""
        if self._workers is not None and self._server is not None:
            self._workers.end()
            self._server.__exit__()
        self._server = self._workers = None
