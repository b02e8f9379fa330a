"""What the harness itself costs, with intervals: `python -m tools.own_costs [RESULTS]`.

Processor seconds, each in processes of their own: `--help`, planning a large sweep, `plan`, `run`
and `report` of 200 cells that have run, the NCCL audit of long logs; the share of a step's time
that meters take in the records of RESULTS. Beside a peer, pair by pair: loading and starting the
core beside FSDP2 (`tools/first_step.py`), and `mfsdp-bench run` of a cell of one step beside
torchrun alone, which starts the same ranks. Nothing is judged here; what is aimed at is `AIMS`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from bench.store import ResultsStore, layout, samples
from reports.statistics.interval import Rearrangements, subset_means
from tools.many_cells import CELLS, write_cells
from tools.nccl_log import KINDS, write_log

_REPEATS = 8
_LOG_LINES = 2_000_000
_PLAN = """
from bench.resolve import Machine
from sweeps.definition import parse_sweep
from sweeps.planning import make_plan
seeds = ", ".join(map(str, range(312)))
text = (
    "name: big\\nbase:\\n  train: {steps: 5, global_batch: 64, micro_batch: 1}\\nmatrix:\\n"
    "  product:\\n    engine.name: [ddp, mfsdp]\\n"
    "    engine.strategy: [no_shard, optim, optim_grads, optim_grads_params]\\n"
    "    dtypes.compute: [fp32, bf16]\\n    model.recompute: [none, full]\\n"
    f"    train.seed: [{seeds}]\\n"
)
make_plan(parse_sweep(text), Machine(cpu_count=2, memory_bytes=2**34))
"""
AIMS = {
    "loading mfsdp_core, of FSDP2": "1.00",
    "sharding and first step, 2,000 weights in 400 units, of FSDP2": "0.70",
    "all of it, of FSDP2": "1.00",
    "run of one cell, Enter to first step, of torchrun alone": "1.00",
    "plan": "10 s",
    "run": "10 s",
    "report": "10 s",
}
"""At most; of what stands beside a peer the ratio."""
_ONE_STEP = ("--set", "train.steps=1", "--set", "train.warmup_steps=1")
_COMMANDS = {
    "mfsdp-bench --help": ("-m", "bench", "--help"),
    "plan of 9,984 cells": ("-c", _PLAN),
}


def processor_seconds(arguments: Sequence[str]) -> float:
    """Of a Python process with these arguments, from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def first_steps(repeats: int) -> dict[str, list[float]]:
    """Ratios of `mfsdp` over `fsdp2`, of processes that take turns."""
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        spent = {}
        for engine in ("fsdp2", "mfsdp"):
            command = (sys.executable, "-m", "tools.first_step", engine)
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            loaded, sharded, stepped = json.loads(done.stdout.splitlines()[-1]).values()
            spent[engine] = loaded, sharded + stepped, loaded + sharded + stepped
        for aim, theirs, ours in zip(AIMS, spent["fsdp2"], spent["mfsdp"], strict=False):
            found.setdefault(aim, []).append(ours / theirs)
    return found


def runs_of_one_cell(folder: Path, repeats: int) -> tuple[Path, dict[str, list[float]]]:
    """A run, and seconds from Enter to the first step: under the harness, and torchrun alone.

    Torchrun starts the harness's own worker, with a copy of the specification of the run.
    """
    results, plain, step = folder / "one", folder / "plain", samples.node_file(0)
    chosen = ("--only", "engine=mfsdp-optim_grads_params,policy=fp32", "--force")
    command = ("-m", "bench", "run", "quickstart", *chosen, "--results", str(results))
    alone = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    found: dict[str, list[float]] = {"mfsdp-bench run": [], "torchrun alone": []}
    for _ in range(repeats):
        start = time.time()
        _silently(*command, *_ONE_STEP)
        newest = max(results.glob("runs/*/*"), key=lambda run: run.name)
        first_step = (newest / step).stat().st_mtime
        if first_step < start:
            raise RuntimeError(f"{' '.join(command)} has started no run")
        found["mfsdp-bench run"].append(first_step - start)
        shutil.rmtree(plain, ignore_errors=True)
        (plain / layout.LOGS).mkdir(parents=True)
        shutil.copy(newest / layout.SPEC, plain)
        start = time.time()
        _silently(*alone, "-m", "bench.worker", str(plain), OMP_NUM_THREADS="1")
        found["torchrun alone"].append((plain / step).stat().st_mtime - start)
    _silently(*command)
    return max(results.glob("runs/*/*"), key=lambda run: run.name), found


def _silently(*arguments: str, **variables: str) -> None:
    command, quiet = [sys.executable, *arguments], subprocess.DEVNULL
    # Unchecked: a run of one step has no steady time, and says so. What fails leaves no file.
    subprocess.run(command, check=False, stdout=quiet, stderr=quiet, env=os.environ | variables)


def starts_and_many_cells(repeats: int) -> None:
    """Measure and print what has a peer, and verbs on many cells."""
    for aim, ratios in first_steps(repeats).items():
        print(_aimed(aim, ratios, lambda value: f"{value:.2f}"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, found = runs_of_one_cell(folder, repeats)
        for what, seconds in found.items():
            print(told(f"{what}, Enter to first step", seconds, lambda value: f"{value:.2f} s"))
        ratios = [ours / theirs for ours, theirs in zip(*found.values(), strict=True)]
        print(_aimed(list(AIMS)[3], ratios, lambda value: f"{value:.2f}"))
        file, at = str(write_cells(folder, run)), ("--results", str(folder / "results"))
        verbs = {"plan": (file,), "run": (file, *at), "report": ("many", *at)}
        for verb, arguments in verbs.items():
            values = [processor_seconds(("-m", "bench", verb, *arguments)) for _ in range(repeats)]
            what = f"{verb} of {CELLS} cells that have run, processor time"
            print(_aimed(verb, values, lambda value: f"{value:.2f} s", what))


def _aimed(aim: str, values: Sequence[float], text: Callable[[float], str], what: str = "") -> str:
    return f"{told(what or aim, values, text)}; aim: at most {AIMS[aim]}"


def meter_shares(results: Path) -> list[float]:
    """Of the time of a step, what meters took; one value per run that recorded it."""
    if not results.is_dir():
        return []
    records = ResultsStore.open(results, create=False).records()
    meters = [(one.environment.get("runtime") or {}).get("meters") for one in records]
    return [float(one["fraction_of_step_time"]) for one in meters if one]


def told(what: str, values: Sequence[float], text: Callable[[float], str]) -> str:
    """Median and 95 % interval of `reports/statistics/interval.py`; none from fewer than 6."""
    if not values:
        return f"{what}: nothing recorded"
    line = f"{what}: median {text(median(values))}"
    interval = Rearrangements(subset_means(values)).interval(0.05)
    if interval is None:
        return f"{line}, n={len(values)}, too few for an interval"
    return f"{line}, {text(interval[0])} to {text(interval[1])} (95 %, n={len(values)})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", nargs="?", type=Path, default=Path("results"))
    parser.add_argument("--repeats", type=int, default=_REPEATS)
    options = parser.parse_args(arguments)
    for what, command in _COMMANDS.items():
        values = [processor_seconds(command) for _ in range(options.repeats)]
        print(told(f"{what}, processor time", values, lambda value: f"{value:.2f} s"))
    starts_and_many_cells(options.repeats)
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / f"{kind}.log"
            write_log(log, kind, _LOG_LINES)
            command = ("-m", "bench", "nccl", str(log))
            values = [processor_seconds(command) for _ in range(options.repeats)]
        what = f"audit of {_LOG_LINES:,} lines ({kind}), processor time"
        print(told(what, values, lambda value: f"{value:.2f} s"))
    shares = meter_shares(options.results)
    print(told("meters, of a step's time", shares, lambda value: f"{100 * value:.2f} %"))


if __name__ == "__main__":
    main()
