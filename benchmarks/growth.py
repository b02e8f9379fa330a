"""How cost grows, beside FSDP2's: `python -m benchmarks.growth units|ranks|parameters|hybrid`.

Two engines in one set of CPU ranks step in turn (`benchmarks.step_profile`), for one size after
another: units 4 to 64 of a small width, ranks 2 to 8 of `bench-34m`, or parameters from 10M on.
`hybrid`: a 2 x 2 mesh and gathering by module against FSDP2's own hybrid sharding. Milliseconds
per step of rank 0, medians: wall time, and CPU time of all threads of the rank, which other
processes disturb less. A size that does not fit into memory is left out and named.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.engines.fsdp2 import Fsdp2Engine
from bench.models.units import units
from bench.resolve import Machine, resolve
from bench.resolve.parameter_facts import parameter_facts
from bench.spec import ResolvedDtypes, ResolvedRun, RunSpec
from bench.store.atomic import write_json_atomically
from benchmarks.step_profile import measure, origin

_STRATEGY = "optim_grads_params"
_FP32 = {"compute": "fp32", "main_params": "fp32", "main_grads": "fp32", "grad_comm": "fp32"}
#: Weight, gradient, two moments and what is gathered or under way, in FP32.
_BYTES_PER_PARAMETER = 4 * 6

Point = tuple[str, Mapping[str, Any], int]
_SMALL: Final = {"preset": "debug", "hidden": 128, "ffn_hidden": 352, "vocab": 1024}
CURVES: Final[Mapping[str, tuple[Point, ...]]] = {
    "units": tuple((str(n), {**_SMALL, "layers": n}, 2) for n in (4, 8, 16, 32, 64)),
    "ranks": tuple((str(n), {"preset": "bench-34m"}, n) for n in (2, 3, 4, 6, 8)),
    "parameters": (
        ("10M", {"preset": "bench-34m", "layers": 2, "vocab": 4096}, 2),
        ("34M", {"preset": "bench-34m"}, 2),
        ("100M", {"preset": "bench-34m", "hidden": 768, "ffn_hidden": 2048, "layers": 12}, 2),
        ("300M", {"preset": "bench-34m", "hidden": 1024, "ffn_hidden": 2816, "layers": 22}, 2),
    ),
    "hybrid": (("2 x 2", {"preset": "bench-34m"}, 4),),
}
_HYBRID_FSDP2: Final = "benchmarks.growth:build_hybrid"
_OUTER: Final = 2
ENGINES: Final[Mapping[str, tuple[Mapping[str, Any], ...]]] = {
    "hybrid": (
        {"name": _HYBRID_FSDP2},
        {"name": "mfsdp", "outer_size": _OUTER, "transport": "same_host"},
        {
            "name": "mfsdp",
            "outer_size": _OUTER,
            "transport": "same_host",
            "fine_grained_gather": True,
        },
    ),
}
PLAIN: Final = ({"name": "fsdp2"}, {"name": "mfsdp", "transport": "same_host"})


class HybridFsdp2(Fsdp2Engine):
    """FSDP2 on two axes: shards on the inner one, copies along the outer. Only its time counts."""

    def _shard(self, model: nn.Module, dtypes: ResolvedDtypes, device: torch.device) -> None:
        del dtypes
        shape = (_OUTER, torch.distributed.get_world_size() // _OUTER)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("outer", "inner"))
        for layer in units(model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)


def build_hybrid(model: nn.Module, resolved: ResolvedRun, device: torch.device) -> HybridFsdp2:
    """Factory of `bench.engines.registry`."""
    return HybridFsdp2(model, resolved, device)


def run_of(model: Mapping[str, Any], engine: Mapping[str, Any], ranks: int) -> ResolvedRun:
    """One run of a curve; `optim_grads_params`, FP32, AdamW, sequences of 64."""
    train = {"steps": 10, "global_batch": ranks, "micro_batch": 1, "seq_len": 64, "clip_norm": 1.0}
    asked = {
        "model": model,
        "data": {"kind": "markov"},
        "engine": {"strategy": _STRATEGY, **engine},
        "dtypes": _FP32,
        "train": {**train, "optimizer": "adamw", "lr": 3e-4},
        "launch": {"ranks": ranks, "device": "cpu"},
    }
    return resolve(RunSpec.model_validate(asked), Machine.detect())


def fits(run: ResolvedRun, engines: int) -> bool:
    """Whether all ranks of `engines` engines have room beside each other."""
    if run.shape is None:
        return True
    parameters = sum(math.prod(fact.shape) for fact in parameter_facts(run.shape, "fp32"))
    # Sharded state, gathered units and gradients, and the whole model of each rank at first.
    needed = engines * (_BYTES_PER_PARAMETER + 4 * run.launch.ranks) * parameters
    return needed < int(psutil.virtual_memory().available)


def curve(name: str, steps: int) -> Iterator[dict[str, Any]]:
    """One row per size: steps of all engines."""
    for size, model, ranks in CURVES[name]:
        runs = [run_of(model, engine, ranks) for engine in ENGINES.get(name, PLAIN)]
        row: dict[str, Any] = {name: size, "ranks": ranks}
        if not fits(runs[0], len(runs)):
            row["left_out"] = "does not fit into the memory that is available"
        else:
            found = measure(runs, steps).values()
            row["steps"] = [one["phases"]["step"] for one in found]
        yield row


def line(row: Mapping[str, Any], name: str) -> str:
    """A row as text: per engine wall and CPU milliseconds, and the ratio of wall and CPU time."""
    start = f"{name} {row[name]:>5} on {row['ranks']} ranks:"
    if "left_out" in row:
        return f"{start} {row['left_out']}"
    first = row["steps"][0]
    cells = []
    for step in row["steps"]:
        wall, cpu = step["wall_milliseconds"], step["cpu_milliseconds"]
        ratios = wall / first["wall_milliseconds"], cpu / first["cpu_milliseconds"]
        cells.append(f"{wall:8.1f} ({cpu:7.1f}) ms {ratios[0]:.2f} ({ratios[1]:.2f})")
    return start + " |".join(cells)


def main() -> None:
    """Measure one curve, print its rows as they come, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("curve", choices=list(CURVES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=None, metavar="FILE")
    asked = parser.parse_args()
    facts = origin()
    engines = [engine["name"] for engine in ENGINES.get(asked.curve, PLAIN)]
    print(f"per step, wall (CPU of rank 0), ratio to the first: {', '.join(engines)}")
    rows: list[dict[str, Any]] = []
    for row in curve(asked.curve, asked.steps):
        print(line(row, asked.curve), flush=True)
        rows.append(row)
        if asked.out is not None:
            write_json_atomically(asked.out, facts | {"engines": engines, "rows": rows})


if __name__ == "__main__":
    main()
