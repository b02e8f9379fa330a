"""What hooks and schedule cost the host per unit, next to FSDP2's.

Units of 256 parameters on torch's fake process group, which returns from every collective at once:
arithmetic, memory and transfers vanish, and what is left of a forward and backward pass is the
bookkeeping of the engine. Rounds of the same model without an engine, under FSDP2 (each unit
resharded after its forward, as by default) and under this package (`optim_grads_params`) alternate
in one process: plain units, units whose activations are recomputed, and hybrid sharding on 2 x 2
ranks. Time is the CPU time of the thread, which other processes disturb least, and its ratio the
median of the ratios of rounds; calls of Python functions are counted as well, which nothing
disturbs.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from mfsdp_core.api import fully_shard_model

CASES: Final = ("zero3", "recompute", "hsdp")
_ENGINES: Final = ("fsdp2", "mfsdp")
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

    def __init__(self, units: int, *, recomputes: bool) -> None:
        super().__init__()
        self.units = nn.ModuleList(TinyUnit() for _ in range(units))
        self._recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 16] to a scalar."""
        for unit in self.units:
            x = checkpoint(unit, x, use_reentrant=False) if self._recomputes else unit(x)
        return x.sum()


@dataclass(frozen=True)
class HostCost:
    """Per unit of one forward and backward pass, the model's own arithmetic taken off.

    seconds: CPU time of the thread, median over rounds. calls: of Python functions.
    """

    seconds: float
    calls: float


def measure(case: str, units: int, rounds: int) -> dict[str, HostCost]:
    """Host cost per unit in a case, of each engine; `ratio`: mfsdp over fsdp2, of time by rounds.

    Needs a default process group of type fake, of four ranks.
    """
    passes = {name: _pass_of(name, case, units) for name in ("plain", *_ENGINES)}
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for round_ in range(_WARM_UP + rounds):
        for name, run in passes.items():
            start = time.thread_time()
            run()
            if round_ >= _WARM_UP:
                seconds[name].append(time.thread_time() - start)
    calls = {name: _calls(run) for name, run in passes.items()}
    own = {
        name: [a - b for a, b in zip(seconds[name], seconds["plain"], strict=True)]
        for name in _ENGINES
    }
    costs = {
        name: HostCost(median(own[name]) / units, (calls[name] - calls["plain"]) / units)
        for name in _ENGINES
    }
    theirs, ours = own.values()
    ratio = median(b / a for a, b in zip(theirs, ours, strict=True))
    return costs | {"ratio": HostCost(ratio, costs["mfsdp"].calls / costs["fsdp2"].calls)}


def _calls(run: Callable[[], None]) -> int:
    profile = cProfile.Profile()
    profile.runcall(run)
    stats: Any = pstats.Stats(profile)
    return int(stats.total_calls)


def _pass_of(engine: str, case: str, units: int) -> Callable[[], None]:
    model = TinyModel(units, recomputes=case == "recompute")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "dp"))
    used = mesh if case == "hsdp" else mesh["dp"]
    if engine == "fsdp2":
        for unit in model.units:
            fully_shard(unit, mesh=used)
        fully_shard(model, mesh=used, reshard_after_forward=False)
    elif engine == "mfsdp":
        return _mfsdp_pass(model, mesh, is_hybrid=case == "hsdp")
    return _pass(model, model.zero_grad)


def _mfsdp_pass(model: TinyModel, mesh: DeviceMesh, *, is_hybrid: bool) -> Callable[[], None]:
    where: dict[str, Any] = {"device_mesh": mesh["dp"]}
    if is_hybrid:
        group = mesh["outer", "dp"]._flatten("both").get_group()
        where = {"device_mesh": mesh, "dp_outer_dim": "outer", "hybrid_fsdp_group": group}
    sharded = fully_shard_model(model, dp_shard_dim="dp", fsdp_unit_modules=[TinyUnit], **where)
    return _pass(sharded, sharded.zero_grad_buffer)


def _pass(model: nn.Module, reset: Callable[[], object]) -> Callable[[], None]:
    batch = torch.randn(4, _WIDTH)

    def run() -> None:
        model(batch).backward()
        reset()

    return run


def main() -> None:
    """Print one line per engine and case, and the two ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Registers the backend `fake` on import; torch has no public name for it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    measured = {case: measure(case, options.units, options.rounds) for case in CASES}
    dist.destroy_process_group()
    for case, costs in measured.items():
        for name in _ENGINES:
            seconds, calls = costs[name].seconds, costs[name].calls
            print(f"{case:9} {name}: {seconds * 1e6:5.0f} us and {calls:5.0f} calls a unit")
        ratio = costs["ratio"]
        print(f"{case:9} ratio: {ratio.seconds:.2f} of the time, {ratio.calls:.3f} of calls")


if __name__ == "__main__":
    main()
