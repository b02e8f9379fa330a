"""Where the time of a step goes: `python -m tools.step_profile RUN_FOLDER ... --out FILE`.

The engines of two or more finished runs that agree on ranks and device are built side by side in
one set of ranks and step in turn, so that what disturbs the machine disturbs all of them. Measured
on rank 0, medians over steps: wall time and CPU time (of all threads of the process) of each phase
of a step. Then, in steps of their own, torch's profiler: self time of the operations of the
thread that trains, per step. RUN_FOLDER holds a `spec.json`, or folders that do.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile

from bench.data.batches import Batches, build_batches
from bench.engines.protocol import Engine
from bench.engines.registry import build_engine
from bench.errors import UsageError
from bench.models.build import run_model
from bench.spec import ResolvedRun
from bench.store.atomic import write_json_atomically
from bench.store.reading import read_spec
from bench.store.run_folder import utc_now
from tools.origin import origin

PHASES = ("forward and backward", "clip", "optimizer", "zero_grad")
METERS = ("wall_milliseconds", "cpu_milliseconds", "page_faults")
_WARM_UP = 3
_PROFILED = 3
_OPERATIONS = 14


class _Subject:
    """One engine that steps when it is told to."""

    def __init__(self, resolved: ResolvedRun, rank: int) -> None:
        device = torch.device(resolved.launch.device)
        self.name = resolved.slug
        model, make_batch = run_model(resolved, device)
        self._resolved = resolved
        self._batches: Batches = build_batches(resolved, rank, device, make_batch)
        self._engine: Engine = build_engine(model, resolved, device)
        self._step = 0
        self.samples: dict[str, list[tuple[float, float, float]]] = {phase: [] for phase in PHASES}

    def step(self) -> None:
        """One optimizer step, phase by phase."""
        train, count = self._resolved.train, self._resolved.microbatches
        with self._timed("forward and backward"):
            for index in range(count):
                tokens, targets = self._batches.microbatch(self._step, index)
                self._engine.forward_backward(tokens, targets, 1 / count, index == count - 1)
        with self._timed("clip"):
            if train.clip_norm is not None:
                self._engine.clip_grad_norm(train.clip_norm)
        with self._timed("optimizer"):
            self._engine.optimizer_step()
        with self._timed("zero_grad"):
            self._engine.zero_grad()
        self._step += 1

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = _meters()
        yield
        wall, cpu, faults = (end - start for start, end in zip(began, _meters(), strict=True))
        self.samples[phase].append((wall * 1e3, cpu * 1e3, faults))

    def phases(self) -> dict[str, dict[str, float]]:
        """Median milliseconds per phase, and of whole steps under `step`."""
        kept = {phase: samples[_WARM_UP:] for phase, samples in self.samples.items()}
        steps = zip(*kept.values(), strict=True)
        kept["step"] = [
            (sum(a), sum(b), sum(c)) for a, b, c in (zip(*s, strict=True) for s in steps)
        ]
        return {
            phase: dict(
                zip(METERS, (median(one) for one in zip(*samples, strict=True)), strict=True)
            )
            for phase, samples in kept.items()
        }


def _meters() -> tuple[float, float, float]:
    """Seconds of wall time and of this process's CPU time, and its page faults so far."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return time.perf_counter(), time.process_time(), faults


def _profiled(step: Callable[[], None]) -> dict[str, float]:
    """Self milliseconds per step of the operations that take most."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(_PROFILED):
            step()
    taken = sorted(recorded.key_averages(), key=lambda e: -e.self_cpu_time_total)
    return {e.key: e.self_cpu_time_total / 1e3 / _PROFILED for e in taken[:_OPERATIONS]}


def _rank(rank: int, runs: Sequence[ResolvedRun], steps: int, folder: str) -> None:
    launch = runs[0].launch
    torch.set_num_threads(launch.threads_per_rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=launch.ranks
    )
    subjects = [_Subject(resolved, rank) for resolved in runs]
    for turn in range(_WARM_UP + steps):
        for subject in subjects if turn % 2 else reversed(subjects):
            dist.barrier()
            subject.step()
    found = [(f"{i} {subject.name}", subject.phases()) for i, subject in enumerate(subjects, 1)]
    operations = [_profiled(subject.step) for subject in subjects]
    dist.barrier()
    if rank == 0:
        engines = {
            name: {"phases": phases, "operations_self_milliseconds": taken}
            for (name, phases), taken in zip(found, operations, strict=True)
        }
        write_json_atomically(Path(folder) / "found.json", engines)
    os._exit(0)  # gloo's threads may abort an interpreter that ends (bench/launch/process.py)


def measure(runs: Sequence[ResolvedRun], steps: int) -> dict[str, Any]:
    """The profile of engines side by side: number and slug of a run -> phases and operations.

    Raises:
        UsageError: the runs differ in ranks, or are not for CPU ranks.
    """
    ranks = {resolved.launch.ranks for resolved in runs}
    if len(ranks) != 1 or any(resolved.launch.device != "cpu" for resolved in runs):
        raise UsageError(
            f"expected runs on one number of CPU ranks, found {sorted(ranks)} ranks on "
            f"{sorted({resolved.launch.device for resolved in runs})}. Name runs of one cell."
        )
    with TemporaryDirectory() as folder:
        spawn(_rank, (runs, steps, folder), nprocs=ranks.pop())
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found


def table(engines: dict[str, Any]) -> str:
    """The phases as text, one line per phase, ratios to the first engine."""
    names = list(engines)
    lines = [f"{'wall (CPU) ms, faults':24}" + "".join(f"{name:>43}" for name in names)]
    for phase in (*PHASES, "step"):
        cells = [engines[name]["phases"][phase] for name in names]
        first = cells[0]["wall_milliseconds"]
        lines.append(f"{phase:24}" + "".join(_columns(cell, first) for cell in cells))
    return "\n".join(lines)


def _columns(cell: dict[str, float], first: float) -> str:
    wall, cpu, faults = (cell[meter] for meter in METERS)
    return f"{wall:20.1f} ({cpu:6.1f}){faults:7.0f}{wall / first:7.2f}"


def main() -> None:
    """Measure, print, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=None, metavar="FILE")
    arguments = parser.parse_args()
    specs = [_spec(folder) for folder in arguments.runs]
    facts = {"measured_utc": utc_now(), **origin()}
    found = measure(specs, arguments.steps)
    sys.stdout.write(table(found) + "\n")
    if arguments.out is not None:
        write_json_atomically(arguments.out, facts | {"engines": found})


def _spec(folder: Path) -> ResolvedRun:
    newest = sorted(path.parent for path in folder.rglob("spec.json"))
    if not newest:
        raise UsageError(f"expected a run's folder, found no spec.json under {folder}")
    return read_spec(newest[-1])


if __name__ == "__main__":
    main()
