"""Two ranks over NCCL, whose kernels are held up: what is read too early is wrong there.

The same programs run on a CPU over gloo, in time, and over the late device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from bench.testing.workers import ForkServer, Workers
from bench.validate.session import MODULES
from late.programs import WAYS, Case, behind_slow_kernels
from oracle.ranks import RankPool, enter_devices
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.processes
_SECONDS = 60.0


@pytest.fixture(scope="module")
def devices() -> Iterator[Workers]:
    """Two ranks on a device each; on one device where NCCL can do that."""
    paths = tuple(filter(None, sys.path))
    with (
        ForkServer("cuda", paths, MODULES) as server,
        server.workers(2, prepare=enter_devices) as workers,
    ):
        yield workers


@pytest.mark.multigpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_behind_slow_kernels_are_the_oracles(
    devices: Workers, strategy: str, way: str
) -> None:
    case = Case(strategy, options=WAYS[way])
    for seed in (0, 1):
        for apart, held_up in devices.run(behind_slow_kernels, case, seed, seconds=_SECONDS):
            assert held_up > 0
            assert apart <= 1e-12


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replays_behind_slow_kernels_give_the_oracles_weights(
    devices: Workers, strategy: str
) -> None:
    graph = {"cuda_graph_mode": True, "fsdp_double_buffer": True}
    case = Case(strategy, "", "aligned_stack", graph, captured=True, steps=7)
    for apart, _ in devices.run(behind_slow_kernels, case, 0, seconds=_SECONDS):
        assert apart <= 1e-12


@pytest.mark.sample
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_kernel_stands_before_every_collective_and_behind_every_layer(
    ranks: RankPool, strategy: str, way: str
) -> None:
    """The programs of the other tests, on a CPU: a program that is wrong is wrong there as well."""
    case = Case(strategy, options=WAYS[way])
    found = ranks.run(behind_slow_kernels, case, 0, "cpu")
    assert max(apart for apart, _ in found) <= 1e-12
    layers = 3 * 2 * 2  # steps, microbatches, and at least two modules of the model
    assert min(held_up for _, held_up in found) > layers
