"""A run as a post shows it: label with configuration, and its lines in the form of Megatron-LM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

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
from reports.compare import logs as imported
from reports.compare.logs import Shown
from reports.nccl import events
from reports.renderers.printable import printable
from reports.views.cells import Cell
from reports.views.machine import entries

_MIB = 2.0**20
_LEAST_BYTES = 1024
"""Smaller messages are scalars of the loop, not gradients or weights."""


@dataclass(frozen=True)
class PostEntry:
    """title: the label with its configuration. lines: memory and iteration, as text.

    reproduce: how to have the run again. kernels: what the lines of NCCL show, "" where there are
    none.
    """

    name: str
    title: str
    lines: tuple[str, ...]
    reproduce: str
    run: Shown
    kernels: str = ""


def of_import(run: ImportedRun) -> PostEntry:
    """That of an imported run: its line as it stood, but for what stood before it."""
    last = run.steps[-1] if run.steps else None
    work, origin = run.workload, run.provenance
    lines = [] if last is None else [*_memory(last), _iteration(last, work)]
    facts = (
        work.model,
        None if _states(origin.label, work.seq_len) else f"sequence {work.seq_len:,}",
        None if work.ranks is None else f"{work.ranks} ranks",
        work.device,
        work.strategy,
    )
    named = origin.label or run.id
    config = ", ".join(one for one in facts if one and one.lower() not in named.lower())
    return PostEntry(
        run.id,
        printable(f"{named} ({config})" if config else named),
        tuple(map(printable, lines)),
        f"mfsdp-bench import {printable(origin.source)}  # sha256 {origin.sha256[:12]}",
        imported.of_import(run),
        _counted(Counter(filter(None, map(_kernel, run.nccl)))),
    )


def of_cell(cell: Cell) -> PostEntry:
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
    memory = {
        "max allocated": cell.value(ALLOCATOR_PEAK),
        "ledger peak": cell.value(LEDGER_PEAK),
        "resident": cell.value(RSS),
    }
    lines = _memory_line(train.steps, memory)
    config = (
        f"{resolved.engine.name} {resolved.strategy}, {cell.dtypes}, {resolved.model_text},"
        f" sequence {train.seq_len:,}, {resolved.launch.ranks} {resolved.launch.device} ranks"
    )
    commit = entries(record.environment, "git").get("commit")
    argv = [str(word) for word in record.environment.get("argv") or ("run", "...")]
    command = " ".join(["mfsdp-bench", *argv[1:]]) if argv[1:] else "mfsdp-bench run"
    return PostEntry(
        cell.name,
        printable(f"{cell.name} ({config})"),
        tuple(map(printable, (*lines, _iteration(step, record.workload)))),
        printable(command) + (f"  # commit {str(commit)[:12]}" if commit else ""),
        imported.of_cell(cell),
    )


def _kernel(line: str) -> tuple[str, str] | None:
    """Operation and kind of kernel that a line of NCCL tells; None for scalars and other lines."""
    found = events.tuning(line.partition(" NCCL INFO ")[2].encode())
    if found is None or not found.operation or not found.kind or found.size_bytes < _LEAST_BYTES:
        return None
    return found.operation, found.kind


def _states(label: str, seq_len: int | None) -> bool:
    """Whether there is nothing to add to the label."""
    if seq_len is None:
        return True
    forms = (str(seq_len), f"{seq_len:,}", f"{seq_len // 1024}K")
    return any(form in label.upper() for form in forms)


def _counted(kinds: Mapping[tuple[str, str], int]) -> str:
    return ", ".join(f"{op} {kind}: {n} lines" for (op, kind), n in sorted(kinds.items()))


def _iteration(step: ImportedStep, work: Workload) -> str:
    said = (
        ("elapsed time per iteration (ms)", step.milliseconds, ".1f"),
        ("throughput per GPU (TFLOP/s/GPU)", step.teraflops_per_device, ".4g"),
        ("global batch size", work.global_batch, "d"),
        ("lm loss", step.loss, ".6E"),
        ("grad norm", step.grad_norm, ".3f"),
    )
    stamp = step.extra.get("timestamp")
    parts = [f"{name}: {value:{form}}" for name, value, form in said if value is not None]
    start = f"[{stamp}] " if stamp else ""
    return f"{start}iteration {step.step:8d}/{work.steps or step.step:8d} | {' | '.join(parts)} |"


def _memory(step: ImportedStep) -> list[str]:
    said = {
        "allocated": step.device_allocated_bytes,
        "max allocated": step.device_peak_bytes,
        "reserved": step.device_reserved_bytes,
        "max reserved": step.device_reserved_peak_bytes,
    }
    after = step.extra.get("memory after iterations", step.step)
    return _memory_line(int(float(after)), said)


def _memory_line(after: int, said: Mapping[str, float | None]) -> list[str]:
    """The line, where any number is known."""
    known = [f"{name}: {one / _MIB:.2f}" for name, one in said.items() if one is not None]
    line = f"[Rank 0] (after {after} iterations) memory (MB) | {' | '.join(known)}"
    return [line] if known else []
