"""What a step does and where its time goes: parts, devices, counts, communication, nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from bench.derive.counts import step_counts
from bench.derive.device_state import device_reports
from bench.derive.metrics import COUNTS
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Heading, Paragraph, Section, TableBlock
from reports.renderers.table import Table
from reports.views.cells import Cell, Run
from reports.views.machine import entries

_PHASES = (
    "Medians over the steady steps of a cell's first run, of the rank that took longest, in ms. On "
    "CUDA between events of the device, else by the clock. Microbatch: what lies outside of the "
    "model, and all of it where the model is compiled."
)
_HOST = (
    " Host: until the step was enqueued; where that is as long as the step, the device waits for "
    "the host."
)
_DEVICES = (
    "Of the rank that took longest. Retries: how often torch's allocator had to free what it kept "
    "and ask again. Drift: by how much its reserved but unallocated memory grew from the first "
    "steady step to the last."
)


def phases_section(findings: Findings) -> Section | None:
    """None where no run has parts of steps."""
    runs = [(cell, cell.measured[0]) for cell in findings.measured]
    blocks: list[Block] = []
    names = dict.fromkeys(name for _, run in runs for name in run.summary.phase_milliseconds)
    if names:
        host = any(run.summary.host_milliseconds_median is not None for _, run in runs)
        titles = ("cell", *names, "step", *(("host",) if host else ()))
        rows = (_phase_row(cell, run, tuple(names), host=host) for cell, run in runs)
        blocks.append(TableBlock(Table.of(titles, rows), _PHASES + (_HOST if host else "")))
    devices = [row for cell, run in runs if (row := _device_row(cell, run)) is not None]
    if devices:
        table = Table.of(
            "cell | clock (MHz) | power cap (W) | throttled | retries | drift | told by", devices
        )
        blocks += [Heading("Devices"), TableBlock(table, _DEVICES)]
    return Section("phases", "Parts of a step", tuple(blocks)) if blocks else None


def _phase_row(cell: Cell, run: Run, names: tuple[str, ...], *, host: bool) -> tuple[str, ...]:
    summary = run.summary
    times = [summary.phase_milliseconds.get(name) for name in names]
    times.append(summary.step_milliseconds_median)
    if host:
        times.append(summary.host_milliseconds_median)
    return (cell.name, *map(quantity.significant, times))


def _device_row(cell: Cell, run: Run) -> tuple[str, ...] | None:
    """None for a run on CPUs, and for older records."""
    steady = run.summary.steady
    if steady is None or not any(one.device for one in next(iter(run.record.steps.values()), ())):
        return None
    rank, samples = max(
        run.record.steps.items(), key=lambda one: sum(sample.milliseconds for sample in one[1])
    )
    window = [s.device for s in samples if steady.first <= s.step <= steady.last and s.device]
    clocks = [d["sm_mhz"] for d in window if d.get("sm_mhz") is not None]
    reasons = sorted({reason for d in window for reason in d.get("throttle") or ()} - {"gpu_idle"})
    reports = device_reports(run.record)
    report = reports[rank] if rank < len(reports) else {}
    slack = [d["reserved_bytes"] - d["allocated_bytes"] for d in window if "reserved_bytes" in d]
    clock = quantity.MISSING
    if clocks:
        clock = f"{median(clocks):g} ({min(clocks):g} to {max(clocks):g})"
    return (
        cell.name,
        clock,
        quantity.significant((report.get("before") or {}).get("power_cap_watts")),
        ", ".join(reasons) or ("no" if clocks else "unknown"),
        str(max((d.get("allocation_retries", 0) for d in window), default=0)),
        quantity.binary_bytes(slack[-1] - slack[0]) if slack else quantity.MISSING,
        str(report.get("source") or "nobody"),
    )


def counts_section(findings: Findings) -> Section | None:
    """What a step does; a metric that is zero everywhere is left out."""
    cells = [cell for cell in findings.finished if cell.value(COUNTS[0]) is not None]
    shown = [metric for metric in COUNTS if any(cell.value(metric) for cell in cells)]
    rows = (
        (
            cell.name,
            *(quantity.amount(cell.value(metric), metric.unit) for metric in shown),
            quantity.significant(_calls_per_unit(cell)),
        )
        for cell in cells
    )
    return _section(
        ("counts", "What a step does"),
        ("cell", *(metric.title for metric in shown), "Python calls per unit and rank"),
        rows,
        "One step, counted behind the last timed one, over all ranks. The harness's own Python "
        "calls (loop, data, its models) are left out.",
    )


def communication_section(findings: Findings) -> Section | None:
    """How much of the communication of a profiled run nothing was computed beside."""
    return _section(
        ("communication", "Exposed communication"),
        "cell | operation | intervals | ms | exposed ms | exposed",
        (row for cell in findings.finished for row in _traced(cell)),
        "From rank 0's trace of three steps. Exposed: nothing was computed on the device meanwhile "
        "(on a CPU: by torch, on the thread that trains). A profiled run is slower than others.",
    )


def _section(
    name: tuple[str, str],
    titles: str | tuple[str, ...],
    rows: Iterable[tuple[str, ...]],
    caption: str,
) -> Section | None:
    """One table under an anchor and a title; None without a row."""
    table = Table.of(titles, rows)
    return Section(*name, (TableBlock(table, caption),)) if table.rows else None


def _calls_per_unit(cell: Cell) -> float | None:
    for run in cell.finished:
        counts = step_counts(run.record)
        if counts is not None:
            return run.summary.counts["python_calls"] / (counts.units * counts.ranks)
    return None


def _traced(cell: Cell) -> list[tuple[str, ...]]:
    """Operations in the trace of the last run that has any."""
    for run in reversed(cell.finished):
        operations = entries(run.record.runtime, "communication")
        rows: list[tuple[str, ...]] = []
        for operation in operations:
            traced = entries(operations, operation)
            taken, exposed = float(traced["milliseconds"]), float(traced["exposed_milliseconds"])
            share = quantity.share(exposed / taken, 0) if taken else "none"
            times = quantity.significant(taken), quantity.significant(exposed)
            rows.append((cell.name, operation, str(traced["count"]), *times, share))
        if rows:
            return rows
    return []


def nodes_section(findings: Findings) -> Section | None:
    """How the two data-parallel axes of hybrid cells lie on nodes; None where there is one node."""
    axes = [text for cell in findings.finished if (text := _axes_of(cell))]
    return Section("nodes", "Nodes", tuple(map(Paragraph, axes))) if axes else None


def _axes_of(cell: Cell) -> str:
    """A sentence; "" for cells of one axis or node."""
    outer = cell.resolved.engine.outer_size
    placement = cell.finished[0].record.placement
    if outer == 1 or placement is None or len(placement.ranks_by_node) == 1:
        return ""
    inner = len(placement.nodes) // outer
    groups = [placement.nodes[i * inner : (i + 1) * inner] for i in range(outer)]
    rows = [placement.nodes[i::inner] for i in range(inner)]
    return (
        f"{cell.name}: inner axis of {inner} ranks, {_nodes_of(groups)}; outer axis of {outer}"
        f" ranks, {_nodes_of(rows)} ({', '.join(placement.ranks_by_node)})"
    )


def _nodes_of(groups: Sequence[Sequence[str]]) -> str:
    most = max(len(set(nodes)) for nodes in groups)
    return "within one node" if most == 1 else f"across {most} nodes"
