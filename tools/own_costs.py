"""What the harness itself costs, with intervals: `python -m tools.own_costs [RESULTS]`.

Processor seconds of `--help`, of planning a large sweep and of the NCCL audit of long logs, each in
processes of their own, and the share of a step's time that meters take in the records of RESULTS.
Nothing is judged here.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from bench.store import ResultsStore
from reports.statistics.interval import subset_means, trimmed
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
    interval = trimmed(subset_means(values), 0.05)
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
