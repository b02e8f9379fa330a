"""What a step does and where its time goes: parts, devices, counts, communication, nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from bench.derive.counts import step_counts
from bench.derive.device_state import device_reports
from bench.derive.metrics import COUNTS
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Heading, Paragraph, TableBlock
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
_COUNTS = (
    "One step, counted behind the last timed one, over all ranks. The harness's own Python "
    "calls (loop, data, its models) are left out."
)
_EXPOSED = (
    "From rank 0's trace of three steps. Exposed: nothing was computed on the device meanwhile "
    "(on a CPU: by torch, on the thread that trains). A profiled run is slower than others."
)


def phases_section(findings: Findings) -> Iterator[Block]:
    """Nothing where no run has parts of steps."""
    runs = [(cell.name, cell.measured[0]) for cell in findings.measured]
    parts = dict.fromkeys(part for _, run in runs for part in run.summary.phase_milliseconds)
    host = any(run.summary.host_milliseconds_median is not None for _, run in runs)
    if parts:
        rows = []
        for name, run in runs:
            times = [run.summary.phase_milliseconds.get(part) for part in parts]
            times.append(run.summary.step_milliseconds_median)
            times += [run.summary.host_milliseconds_median] * host
            rows.append((name, *map(quantity.significant, times)))
        titles = ("cell", *parts, "step", *(["host"] * host))
        yield TableBlock(Table.of(titles, rows), _PHASES + _HOST * host)
    if devices := [row for name, run in runs for row in _device_rows(name, run)]:
        yield Heading("Devices")
        table = Table.of(
            "cell | clock (MHz) | power cap (W) | throttled | retries | drift | reported by",
            devices,
        )
        yield TableBlock(table, _DEVICES)


def _device_rows(name: str, run: Run) -> Iterator[tuple[str, ...]]:
    """None for a run on CPUs, and for older records."""
    steady, steps = run.summary.steady, run.record.steps
    if steady is None or not any(item.device for item in next(iter(steps.values()), ())):
        return
    rank, samples = max(steps.items(), key=lambda item: sum(s.milliseconds for s in item[1]))
    window = [s.device for s in samples if steady.first <= s.step <= steady.last and s.device]
    clocks = [d["sm_mhz"] for d in window if d.get("sm_mhz") is not None]
    reasons = sorted({reason for d in window for reason in d.get("throttle") or ()} - {"gpu_idle"})
    reports = device_reports(run.record)
    report = reports[rank] if rank < len(reports) else {}
    slack = [d["reserved_bytes"] - d["allocated_bytes"] for d in window if "reserved_bytes" in d]
    clock = f"{median(clocks):g} ({min(clocks):g} to {max(clocks):g})" if clocks else "-"
    yield (
        name,
        clock,
        quantity.significant((report.get("before") or {}).get("power_cap_watts")),
        ", ".join(reasons) or ("no" if clocks else "unknown"),
        str(max((d.get("allocation_retries", 0) for d in window), default=0)),
        quantity.binary_bytes(slack[-1] - slack[0] if slack else None),
        str(report.get("source") or "nobody"),
    )


def counts_section(findings: Findings) -> Iterator[Block]:
    """What a step does; a metric that is zero everywhere is left out."""
    cells = [cell for cell in findings.finished if cell.value(COUNTS[0]) is not None]
    shown = [metric for metric in COUNTS if any(cell.value(metric) for cell in cells)]
    rows = []
    for cell in cells:
        counted = ((step_counts(run.record), run.summary.counts) for run in cell.finished)
        per_unit = (
            sums["python_calls"] / (step.units * step.ranks) for step, sums in counted if step
        )
        amounts = (quantity.amount(cell.value(metric), metric.unit) for metric in shown)
        rows.append((cell.name, *amounts, quantity.significant(next(per_unit, None))))
    if rows:
        titles = (metric.title for metric in shown)
        table = Table.of(("cell", *titles, "Python calls per unit and rank"), rows)
        yield TableBlock(table, _COUNTS)


def communication_section(findings: Findings) -> Iterator[Block]:
    """How much of the communication of a profiled run nothing was computed at the same time."""
    if rows := [row for cell in findings.finished for row in _traced(cell)]:
        titles = "cell | operation | intervals | ms | exposed ms | exposed"
        yield TableBlock(Table.of(titles, rows), _EXPOSED)


def _traced(cell: Cell) -> Iterator[tuple[str, ...]]:
    """Operations in the trace of the last run that has any."""
    traces = (entries(run.record.runtime, "communication") for run in reversed(cell.finished))
    for operation, traced in next(filter(None, traces), {}).items():
        taken, exposed = float(traced["milliseconds"]), float(traced["exposed_milliseconds"])
        share = quantity.share(exposed / taken, 0) if taken else "none"
        times = quantity.significant(taken), quantity.significant(exposed)
        yield cell.name, operation, str(traced["count"]), *times, share


def nodes_section(findings: Findings) -> Iterator[Block]:
    """How the two data-parallel axes of hybrid cells lie on nodes; nothing where there is one."""
    for cell in findings.finished:
        outer = cell.resolved.engine.outer_size
        placement = cell.finished[0].record.placement
        if outer > 1 and placement is not None and len(placement.ranks_by_node) > 1:
            inner = len(placement.nodes) // outer
            groups = [placement.nodes[i * inner : (i + 1) * inner] for i in range(outer)]
            across = [placement.nodes[i::inner] for i in range(inner)]
            yield Paragraph(
                f"{cell.name}: inner axis of {inner} ranks, {_nodes_of(groups)}; outer axis of "
                f"{outer} ranks, {_nodes_of(across)} ({', '.join(placement.ranks_by_node)})"
            )


def _nodes_of(groups: Sequence[Sequence[str]]) -> str:
    most = max(len(set(nodes)) for nodes in groups)
    return "within one node" if most == 1 else f"across {most} nodes"
