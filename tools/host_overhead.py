"""What hooks and schedule cost the host per unit, beside FSDP2's.

Units of 256 parameters on torch's fake process group, which returns from every collective at once:
arithmetic, memory and transfers vanish, and what is left of a forward and backward pass is the
bookkeeping of the engine. Rounds of the same model without an engine, under FSDP2 (each unit
resharded after its forward, as by default) and under this package (`optim_grads_params`) alternate
in one process. Time is the CPU time of the thread, which other processes disturb least; calls of
Python functions are counted as well, which nothing disturbs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from mfsdp_core.api import fully_shard_model

_WIDTH = 16
_WARM_UP = 3


class TinyUnit(nn.Module):
    """[..., 16] to the same shape; two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.down = nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A residual block without any size."""
        down: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + down


class TinyModel(nn.Module):
    """A chain of units and nothing else; returns the sum of its output."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(TinyUnit() for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 16] to a scalar."""
        for unit in self.units:
            x = unit(x)
        return x.sum()


@dataclass(frozen=True)
class HostCost:
    """Per unit of one forward and backward pass, the model's own arithmetic taken off.

    seconds: CPU time of the thread, median over rounds. calls: of Python functions.
    """

    seconds: float
    calls: float


def measure(units: int, rounds: int) -> dict[str, HostCost]:
    """Host cost per unit of `fsdp2` and `mfsdp`. Needs a default process group of type fake."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    passes = {
        "plain": _plain_pass(units),
        "fsdp2": _fsdp2_pass(units, mesh),
        "mfsdp": _mfsdp_pass(units, mesh),
    }
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for round_ in range(_WARM_UP + rounds):
        for name, run in passes.items():
            start = time.thread_time()
            run()
            if round_ >= _WARM_UP:
                seconds[name].append(time.thread_time() - start)
    calls = {name: _calls(run) for name, run in passes.items()}
    return {
        name: HostCost(
            (median(seconds[name]) - median(seconds["plain"])) / units,
            (calls[name] - calls["plain"]) / units,
        )
        for name in ("fsdp2", "mfsdp")
    }


def _calls(run: Callable[[], None]) -> int:
    profile = cProfile.Profile()
    profile.runcall(run)
    stats: Any = pstats.Stats(profile)
    return int(stats.total_calls)


def _pass(model: nn.Module, reset: Callable[[], object]) -> Callable[[], None]:
    batch = torch.randn(4, _WIDTH)

    def run() -> None:
        model(batch).backward()
        reset()

    return run


def _plain_pass(units: int) -> Callable[[], None]:
    model = TinyModel(units)
    return _pass(model, model.zero_grad)


def _fsdp2_pass(units: int, mesh: DeviceMesh) -> Callable[[], None]:
    model = TinyModel(units)
    for unit in model.units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return _pass(model, model.zero_grad)


def _mfsdp_pass(units: int, mesh: DeviceMesh) -> Callable[[], None]:
    model = fully_shard_model(
        TinyModel(units), device_mesh=mesh, dp_shard_dim="dp", fsdp_unit_modules=[TinyUnit]
    )
    return _pass(model, model.zero_grad_buffer)


def main() -> None:
    """Print one line per engine and the two ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Registers the backend `fake` on import; torch has no public name for it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    found = measure(options.units, options.rounds)
    dist.destroy_process_group()
    ours, theirs = found["mfsdp"], found["fsdp2"]
    ratios = {"seconds": ours.seconds / theirs.seconds, "calls": ours.calls / theirs.calls}
    if options.json:
        costs = {name: vars(cost) for name, cost in found.items()}
        print(json.dumps(costs | {"ratio": ratios}))
        return
    for name, cost in found.items():
        print(f"{name}: {cost.seconds * 1e6:6.0f} us and {cost.calls:5.0f} calls per unit and step")
    print(f"mfsdp / fsdp2: {ratios['seconds']:.2f} of the time, {ratios['calls']:.2f} of the calls")


if __name__ == "__main__":
    main()
