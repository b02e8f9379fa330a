"""Rules about this machine: devices, cores, memory, dtypes, files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Final

from bench.resolve.engine_choice import PRECISION_AWARE, codec_of, core_settings
from bench.resolve.import_path import problem_of
from bench.resolve.machine import Machine
from bench.spec import DtypeName, ResolvedRun
from mfsdp_core.plan.strategy import INNER, OUTER, Placement

# More runnable threads than this per core and a step measures the scheduler, not the engine.
MAX_THREADS_PER_CORE = 4

_BF16_CAPABILITY = (8, 0)


def this_machine(run: ResolvedRun, machine: Machine) -> Iterator[tuple[str, str]]:
    """Nodes, devices, cores and memory. Without a cluster there is one node."""
    launch = run.launch
    if launch.nodes > machine.nodes:
        change = ": run it on a cluster (--launcher slurm)" if machine.nodes == 1 else ""
        yield "too-few-nodes", f"needs {launch.nodes} nodes; found {machine.nodes}{change}"
    needed, present = launch.devices_per_node, len(machine.cuda_devices)
    if launch.device == "cuda" and needed > present:
        where = "this machine shows" if machine.nodes == 1 else "a node has"
        devices = f"{needed} CUDA device{'s' if needed > 1 else ''}"
        yield "too-few-devices", f"needs {devices}; {where} {present}"
    ranks, most = launch.ranks_per_node, MAX_THREADS_PER_CORE * machine.cpu_count
    threads = ranks * launch.threads_per_rank
    if launch.device == "cpu" and threads > most:
        yield (
            "too-many-cpu-ranks",
            f"{ranks} ranks x {launch.threads_per_rank} threads = {threads} threads on"
            f" {machine.cpu_count} cores; at most {MAX_THREADS_PER_CORE} per core, {most} here",
        )
    if lacking := _no_bf16(run, machine):
        yield "dtype-not-on-device", lacking
    emulates = launch.device == "cpu" and not machine.native_bf16
    if launch.native_dtypes and emulates and run.dtypes.compute == "bf16":
        yield (
            "dtype-emulated",
            "computes in bf16, which this processor emulates: a step takes several times that of"
            " fp32. Only times suffer: --set launch.native_dtypes=false runs it",
        )
    if lacking := _too_little_memory(run, machine):
        yield "not-enough-memory", lacking


def _no_bf16(run: ResolvedRun, machine: Machine) -> str | None:
    """bf16 on CUDA needs compute capability 8.0; torch emulates it below, at no useful speed.

    On CPU nothing is refused: torch has matrix products, attention, cross-entropy, AdamW and gloo
    reductions in fp64, fp32, bf16 and fp16 (tried with 2.13; fp16 products take about four times as
    long as fp32 ones).
    """
    used = {run.dtypes.compute, run.dtypes.main_params, run.dtypes.main_grads, run.dtypes.grad_comm}
    if run.launch.device != "cuda" or "bf16" not in used:
        return None
    for index, device in enumerate(machine.cuda_devices[: run.launch.ranks_per_node]):
        if device.capability is not None and device.capability < _BF16_CAPABILITY:
            major, minor = device.capability
            return (
                f"bf16 needs CUDA compute capability 8.0; device {index} ({device.name}) has"
                f" {major}.{minor}"
            )
    return None


def _too_little_memory(run: ResolvedRun, machine: Machine) -> str | None:
    """What lies at rest must fit; the bound never refuses what does. The rest is for `fit` to say.

    The kernel kills CPU ranks that do not fit, and perhaps other processes too.
    """
    needed = least_bytes(run)
    if needed is None:
        return None
    what = "for weights, gradients and optimizer state"
    if run.launch.device == "cuda":
        for device in machine.cuda_devices[:1]:
            room = (device.memory_bytes or needed) // run.launch.ranks_per_device
            if device.memory_bytes is not None and needed > room:
                return (
                    f"{run.model_name} needs at least {_gib(needed)} {what} of each rank;"
                    f" {device.name} has {_gib(room)} for it: take more ranks, or a strategy that"
                    " shards more"
                )
        return None
    needed, nodes = needed * run.launch.ranks, run.launch.nodes
    if needed <= machine.memory_bytes * nodes:
        return None
    where = f"{nodes} nodes with {{}} each are given" if nodes > 1 else "this machine has {}"
    return (
        f"{run.model_name} needs at least {_gib(needed)} {what} on {run.launch.ranks} CPU ranks;"
        f" {where.format(_gib(machine.memory_bytes))}"
    )


_ELEMENT_BYTES: Final[dict[DtypeName, int]] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_MOMENTS: Final = {"sgd": 0, "muon": 1}
"""Values of optimizer state per weight; two of all others."""


def least_bytes(run: ResolvedRun) -> int | None:
    """What a rank holds when it updates, at least; None of a model of the user's.

    Main weights, gradients, moments, and whole compute weights where the core keeps those. A weight
    that is kept or sent as codes counts as one byte.
    """
    if run.shape is None:
        return None
    engine, dtypes, train = run.engine, run.dtypes, run.train
    rows = (
        (INNER[run.strategy], run.data_parallel // engine.outer_size),
        (OUTER[engine.outer_strategy], engine.outer_size),
    )
    split = engine.tensor_parallel * engine.expert_parallel

    def held(size: int, placement: str) -> int:
        cut = (ranks for row, ranks in rows if getattr(row, placement) is Placement.FLAT)
        return size * parameters // (prod(cut) * split)

    parameters = run.shape.parameters
    is_encoded = run.linear.quantised_weights or codec_of(engine) is not None
    compute = 1 if is_encoded else _ELEMENT_BYTES[dtypes.compute]
    main = compute if dtypes.main_params is None else _ELEMENT_BYTES[dtypes.main_params]
    moment = _ELEMENT_BYTES[train.state_dtype] if train.optimizer in PRECISION_AWARE else main
    total = held(main + _MOMENTS.get(train.optimizer, 2) * moment, "optimizer")
    total += held(_ELEMENT_BYTES[dtypes.main_grads], "gradient")
    if core_settings(engine) and main > compute and not INNER[run.strategy].gathers_every_use:
        total += held(compute, "parameter")
    return total


def files(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """A model of the user's own, and text to train on, must be where the ranks find them."""
    problem = None if run.factory is None else problem_of(run.factory)
    if problem is not None:
        yield "model-not-here", f"model.factory {run.factory} cannot be loaded: {problem}"
    problem = None if run.data.path is None else _no_text(Path(run.data.path), run.train.seq_len)
    if problem is not None:
        yield (
            "data-not-here",
            f"data.path {run.data.path} names the text to train on, and {problem}",
        )


def _no_text(path: Path, seq_len: int) -> str | None:
    """Why there is not more than one sequence to read at `path`."""
    try:
        if not path.exists():
            return "there is nothing at this path"
        if not os.access(path, os.R_OK):
            return "it cannot be read"
        if not _holds_more_than(path, seq_len):
            return f"it holds no more than one sequence of {seq_len} bytes"
    except OSError as error:
        return error.strerror or "it cannot be read"
    return None


def _holds_more_than(path: Path, size_bytes: int) -> bool:
    """Stops looking at the files of a folder as soon as they are enough."""
    files = [path] if path.is_file() else (file for file in path.rglob("*") if file.is_file())
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > size_bytes:
            return True
    return False


def _gib(count_bytes: int) -> str:
    return f"{count_bytes / 2**30:.1f} GiB"
