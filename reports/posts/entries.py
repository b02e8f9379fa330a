"""A run as a post shows it: label with configuration, and its lines in the form of Megatron-LM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from bench.derive.metrics import (
    ALLOCATOR_PEAK,
    GRAD_NORM,
    LEDGER_PEAK,
    LOSS,
    RSS,
    STEP_TIME,
    TFLOPS,
)
from bench.workload import ImportedRun, ImportedStep, Workload
from reports.nccl import events
from reports.renderers.printable import printable
from reports.views.cells import Cell
from reports.views.machine import entries

_MIB = 2.0**20
_LEAST_BYTES = 1024
"""Smaller messages are scalars of the loop, not gradients or weights."""


class PostEntry(NamedTuple):
    """title: the label with its configuration. lines: memory and iteration, as text.

    reproduce: how to have the run again. kernels: what NCCL's lines show, "" where there are none.
    """

    name: str
    title: str
    lines: tuple[str, ...]
    reproduce: str
    kernels: str = ""


def of_import(run: ImportedRun) -> PostEntry:
    """That of an imported run: its line as it stood, but for what stood before it."""
    last = run.steps[-1] if run.steps else None
    work, origin = run.workload, run.provenance
    lines = [] if last is None else [*_memory_of_log(last), _iteration(last, work)]
    label = origin.label or run.id
    length = "" if work.seq_len is None else f"sequence {work.seq_len:,}"
    if work.seq_len is not None:
        forms = (str(work.seq_len), f"{work.seq_len:,}", f"{work.seq_len // 1024}K")
        length = "" if any(form in origin.label.upper() for form in forms) else length
    ranks = "" if work.ranks is None else f"{work.ranks} ranks"
    facts = filter(None, (work.model, length, ranks, work.device, work.strategy))
    config = ", ".join(fact for fact in facts if fact.lower() not in label.lower())
    kernels = Counter(filter(None, map(_kernel, run.nccl)))
    return PostEntry(
        run.id,
        printable(f"{label} ({config})" if config else label),
        tuple(map(printable, lines)),
        f"mfsdp-bench import {printable(origin.source)}  # sha256 {origin.sha256[:12]}",
        ", ".join(f"{op} {kind}: {n} lines" for (op, kind), n in sorted(kernels.items())),
    )


def of_cell(cell: Cell, kernels: str) -> PostEntry:
    """That of a measured cell: medians over its runs, losses and memory of its last step."""
    resolved, record = cell.resolved, cell.runs[0].record
    train = resolved.train
    step = ImportedStep(
        train.steps,
        cell.value(STEP_TIME),
        cell.value(LOSS),
        cell.value(GRAD_NORM),
        teraflops_per_device=cell.value(TFLOPS),
        extra={"timestamp": record.status.started_utc[:19].replace("T", " ")},
    )
    peaks = {"max allocated": ALLOCATOR_PEAK, "ledger peak": LEDGER_PEAK, "resident": RSS}
    memory = _memory(train.steps, {name: cell.value(metric) for name, metric in peaks.items()})
    config = (
        f"{resolved.engine.name} {resolved.strategy}, {cell.dtypes}, {resolved.model_text},"
        f" sequence {train.seq_len:,}, {resolved.launch.ranks} {resolved.launch.device} ranks"
    )
    commit = entries(record.environment, "git").get("commit")
    argv = [str(word) for word in record.environment.get("argv") or ("run", "...")]
    command = printable(" ".join(["mfsdp-bench", *(argv[1:] or ["run"])]))
    return PostEntry(
        cell.name,
        printable(f"{cell.name} ({config})"),
        tuple(map(printable, (*memory, _iteration(step, record.workload)))),
        command + (f"  # commit {str(commit)[:12]}" if commit else ""),
        kernels,
    )


def _kernel(line: str) -> tuple[str, str] | None:
    """Operation and kind of kernel that a line of NCCL tells; None for scalars and other lines."""
    tuning = events.tuning(line.partition(" NCCL INFO ")[2].encode())
    if tuning and tuning.operation and tuning.kind and tuning.size_bytes >= _LEAST_BYTES:
        return tuning.operation, tuning.kind
    return None


def _iteration(step: ImportedStep, work: Workload) -> str:
    numbers = (
        ("elapsed time per iteration (ms)", step.milliseconds, ".1f"),
        ("throughput per GPU (TFLOP/s/GPU)", step.teraflops_per_device, ".4g"),
        ("global batch size", work.global_batch, "d"),
        ("lm loss", step.loss, ".6E"),
        ("grad norm", step.grad_norm, ".3f"),
    )
    stamp = step.extra.get("timestamp")
    parts = [f"{name}: {value:{form}}" for name, value, form in numbers if value is not None]
    start = f"[{stamp}] " if stamp else ""
    return f"{start}iteration {step.step:8d}/{work.steps or step.step:8d} | {' | '.join(parts)} |"


def _memory_of_log(step: ImportedStep) -> list[str]:
    numbers = {
        "allocated": step.device_allocated_bytes,
        "max allocated": step.device_peak_bytes,
        "reserved": step.device_reserved_bytes,
        "max reserved": step.device_reserved_peak_bytes,
    }
    return _memory(int(float(step.extra.get("memory after iterations", step.step))), numbers)


def _memory(after: int, numbers: Mapping[str, float | None]) -> list[str]:
    """The line, where any number is known."""
    known = [f"{name}: {size / _MIB:.2f}" for name, size in numbers.items() if size is not None]
    line = f"[Rank 0] (after {after} iterations) memory (MB) | {' | '.join(known)}"
    return [line] if known else []
