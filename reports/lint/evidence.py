"""One run as the rules see it: a pasted, imported or measured one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from bench.derive.flops import flops_per_global_batch
from bench.derive.metrics import ALLOCATOR_PEAK, GRAD_NORM, LOSS, STEP_TIME, TFLOPS
from bench.spec import ModelShape
from bench.workload import ImportedRun
from reports.comparisons.imported import counted
from reports.comparisons.imported import of_import as of_log
from reports.nccl import grammar
from reports.views.cells import Cell
from reports.views.machine import describe_hardware

_RATE = re.compile(r"\btok(?:en)?s?\s?(?:/|per )\s?s", re.IGNORECASE)
_SIZE = re.compile(r"llama.*?(\d+(?:\.\d+)?)\s?b\b", re.IGNORECASE)
_SHAPE = re.compile(r"(llama3-)?(\d+)b")
_EXACT = 1e-4
"""How near to a power of two the number of devices is, beyond the rounding of one decimal."""
_SEQUENCES = tuple(2**power for power in range(8, 18))
_MOST_DEVICES = 2**14
_LEAST_BYTES = 1024
"""Smaller messages are scalars of the loop, not gradients or weights."""


@dataclass(frozen=True)
class Solution:
    """Sequence length and number of devices for which the FLOP formula gives what a log prints.

    exact: the number of devices before rounding.
    """

    model: str
    seq_len: int
    devices: int
    exact: float


@dataclass(frozen=True)
class Evidence:
    """Numbers of one run; None is not stated. lines: where in its text they stand, from 1.

    iteration: that of loss and norm of the gradients, the last that has a loss.
    rate: tokens per second, of one device or of all, where no time of a step is told. text: all
    words that describe it. n: runs behind it. nccl: lines by (operation, kind). solutions: the most
    exact one first. columns: what its line says under names that are not ours. begin: the first
    line of its text.
    """

    name: str
    label: str
    text: str
    n: int
    iteration: int | None
    milliseconds: float | None
    teraflops: float | None
    loss: float | None
    grad_norm: float | None
    allocated_bytes: float | None
    peak_bytes: float | None
    model: str | None
    seq_len: int | None
    devices: int | None
    device: str | None
    global_batch: int | None
    mfu_percent: float | None = None
    rate: float | None = None
    measured: bool = False
    source: str = ""
    lines: tuple[int, ...] = ()
    nccl: Mapping[tuple[str, str], int] = field(default_factory=dict)
    nccl_lines: tuple[int, ...] = ()
    solutions: tuple[Solution, ...] = ()
    columns: Mapping[str, float | str] = field(default_factory=dict)
    begin: int = 0

    @property
    def solution(self) -> Solution | None:
        """The one that agrees with what is stated, else the most exact one."""
        fits = [
            one
            for one in self.solutions
            if self.seq_len in (None, one.seq_len) and self.devices in (None, one.devices)
        ]
        return next(iter((*fits, *self.solutions)), None)

    @property
    def shown(self) -> str:
        """The label where there is one."""
        return self.label or self.name


def of_import(
    run: ImportedRun, shapes: Mapping[str, ModelShape], *, model: str | None = None
) -> Evidence:
    """That of a run that was read from a log; `model`: what the text states for all its runs."""
    steps = [step for step in counted(run) if step.milliseconds is not None] or list(run.steps)
    # A run that diverged goes on without a loss: its last one is not that of its last step.
    last = next((one for one in run.steps[::-1] if one.loss is not None), (None, *run.steps)[-1])
    rates = [one.teraflops_per_device for one in steps if one.teraflops_per_device is not None]
    shown, work, origin = of_log(run), run.workload, run.provenance
    stated = work.model or model
    mfu = None if last is None else last.extra.get("mfu")
    speeds = [
        step.tokens_per_second_per_device
        for step in run.steps
        if step.tokens_per_second_per_device is not None
    ] or [
        said
        for step in run.steps
        for name, said in step.extra.items()
        if isinstance(said, float) and _RATE.search(name)
    ]
    nccl = Counter(filter(None, map(choice, run.nccl)))
    found = Evidence(
        run.id,
        origin.label,
        " ".join((origin.label, *(f"{k}={v}" for k, v in work.settings.items()))),
        1,
        last.step if last is not None and last.step else None,
        shown.milliseconds,
        median(rates) if rates else None,
        shown.loss,
        None if last is None else last.grad_norm,
        max((one.device_allocated_bytes or 0 for one in run.steps), default=0) or None,
        shown.peak_bytes,
        stated,
        work.seq_len,
        work.ranks,
        work.device,
        work.global_batch,
        mfu if isinstance(mfu, float) else None,
        median(speeds) if speeds and shown.milliseconds is None else None,
        source=origin.source,
        lines=() if last is None else last.lines,
        nccl=nccl,
        nccl_lines=origin.lines if run.nccl and not run.steps and origin.lines else (),
        columns={} if last is None else last.extra,
        begin=origin.lines[0] if origin.lines else 0,
    )
    return _solved(found, shapes)


def of_cell(cell: Cell) -> Evidence:
    """That of a measured cell, which states everything about itself."""
    resolved, record = cell.resolved, cell.runs[0].record
    return Evidence(
        cell.name,
        "",
        str(resolved.engine.settings.model_dump(mode="json")),
        max(cell.n, len(cell.finished)),
        resolved.train.steps,
        cell.value(STEP_TIME),
        cell.value(TFLOPS),
        cell.value(LOSS),
        cell.value(GRAD_NORM),
        None,
        cell.value(ALLOCATOR_PEAK),
        resolved.model_name,
        resolved.train.seq_len,
        resolved.launch.ranks,
        describe_hardware(record),
        resolved.train.global_batch,
        measured=True,
    )


def choice(line: str) -> tuple[str, str] | None:
    """Operation and kind of kernel that a line of NCCL tells; None for scalars and other lines."""
    found = grammar.tuning(line.partition(" NCCL INFO ")[2].encode())
    if found is None or found.operation is None or not found.kind:
        return None
    if found.size_bytes < _LEAST_BYTES:
        return None
    return found.operation, found.kind


def _solved(run: Evidence, shapes: Mapping[str, ModelShape]) -> Evidence:
    if run.milliseconds is None or not run.teraflops or run.global_batch is None:
        return run
    done = run.teraflops * 1e12 * run.milliseconds / 1e3
    near = _EXACT + 0.05 / run.teraflops + 0.05 / run.milliseconds
    found = [
        Solution(name, seq_len, devices, exact)
        for name, shape in shapes.items()
        if _is_of(run.model, name)
        for seq_len in _SEQUENCES
        for exact in (flops_per_global_batch(shape, seq_len, run.global_batch) / done,)
        for devices in (_power_near(exact),)
        if 1 <= devices <= _MOST_DEVICES and abs(exact / devices - 1) <= near
    ]
    found.sort(key=lambda one: abs(one.exact / one.devices - 1))
    return replace(run, solutions=tuple(found))


def _power_near(exact: float) -> int:
    return 1 << max(round(exact).bit_length() - 1, 0)


def _is_of(stated: str | None, preset: str) -> bool:
    """Where no model is stated, those of which training runs are published are tried."""
    own = _SHAPE.fullmatch(preset)
    if stated is None:
        return own is not None and own[1] is not None
    size = _SIZE.search(stated.replace("_", " "))
    return stated == preset or (size is not None and own is not None and size[1] == own[2])


def model_in(lines: Sequence[str]) -> str | None:
    """The model that a text states before its runs, for all that state none."""
    for line in lines:
        found = re.search(r"\bllama[\s-]?(?:3(?:\.\d)?[\s-]?)?\d+\s?b\b", line, re.IGNORECASE)
        if found:
            return found[0]
    return None
