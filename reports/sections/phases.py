"""Where the time of a step goes, and what the devices were like meanwhile."""

from __future__ import annotations

from statistics import median

from bench.derive.device_state import device_reports
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Heading, Section, TableBlock
from reports.renderers.table import Table
from reports.views.cells import Cell, Run

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
