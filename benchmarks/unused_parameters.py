"""What it costs to find out which parameters nobody used: `python benchmarks/unused_parameters.py`.

Two gloo ranks on this machine train the same chain of units with `unused_parameters="none"`, which
reduces one byte per parameter and cycle, and with `"zero"`, which does not. Cycles of both
alternate; printed are medians of wall time and of the process's CPU time per cycle, of the slower
rank, with a model that uses every parameter and with one that leaves some out on both ranks.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from mfsdp_core import fully_shard_model

_MODES = ("none", "zero")
_WARM_UP = 5


class _Unit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.aside = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return y + self.aside(x) if whole else y


class _Chain(nn.Module):
    def __init__(self, units: int, width: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(_Unit(width) for _ in range(units))

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        for unit in self.units:
            x = unit(x, whole)
        return x.square().mean()


def _rank(rank: int, meeting: str, asked: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    models = {}
    for mode in _MODES:
        torch.manual_seed(0)
        models[mode] = fully_shard_model(
            _Chain(asked.units, asked.width),
            fsdp_unit_modules=[_Unit],
            zero_dp_strategy=asked.strategy,
            unused_parameters=mode,
        )
    batch = torch.randn(asked.rows, asked.width)
    times: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for cycle in range(_WARM_UP + asked.cycles):
        for whole in (True, False):
            for mode in _MODES if cycle % 2 else reversed(_MODES):
                dist.barrier()
                start = time.perf_counter(), time.process_time()
                models[mode](batch, whole).backward()
                models[mode].zero_grad_buffer()
                spent = time.perf_counter() - start[0], time.process_time() - start[1]
                if cycle >= _WARM_UP:
                    times.setdefault((mode, whole), []).append(spent)
    results.put(
        {key: [median(column) for column in zip(*v, strict=True)] for key, v in times.items()}
    )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print one line per mode and model, and the differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="optim_grads_params")
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--cycles", type=int, default=200)
    asked = parser.parse_args()
    context = mp.get_context("spawn")
    results: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        ranks = [context.Process(target=_rank, args=(r, meeting, asked, results)) for r in range(2)]
        for process in ranks:
            process.start()
        found = [results.get() for _ in ranks]
        for process in ranks:
            process.join()
    for whole in (True, False):
        print("every parameter used" if whole else "some left out by both ranks")
        by_mode = {
            m: [max(one[m, whole][i] for one in found) * 1e3 for i in (0, 1)] for m in _MODES
        }
        for mode, (wall, cpu) in by_mode.items():
            print(f"  {mode:5} {wall:8.3f} ms a cycle, {cpu:8.3f} ms of CPU")


if __name__ == "__main__":
    main()
