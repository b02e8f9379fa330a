"""Collectives by themselves: times, bandwidths, and the kernel that ran."""

from __future__ import annotations

from collections.abc import Mapping

from bench.derive.metrics import ALGORITHM_BANDWIDTH, BUS_BANDWIDTH, LATENCY, STEP_TIME
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Paragraph, Section, TableBlock
from reports.renderers.table import Table, folded
from reports.sections.nccl import proofs
from reports.views.cells import Cell

_MEANING = (
    "Medians over the steady steps of a run, and over runs where a cell has several. A step is "
    "several operations in a row; its time is that of one of them, until the slowest rank is "
    "done. Latency: of one operation that the host waits for. Algorithm bandwidth: size over time. "
    "Bus bandwidth: what each link carries, by the formulas of nccl-tests (doc/PERFORMANCE.md): "
    "(n-1)/n of that for all_gather and reduce_scatter of n ranks, twice as much for all_reduce, "
    "all of it for broadcast. Every step also checked the values of one operation to the last bit."
)
_NAMES = ("cell", "operation", "size", "dtype", "memory", "transport", "ranks")
_NUMBERS = ("time (us)", "latency (us)", "algorithm GB/s", "bus GB/s")


def collectives_section(findings: Findings) -> Section | None:
    """None where no collective has a time."""
    cells = [cell for cell in findings.measured if cell.resolved.collective is not None]
    if not cells:
        return None
    kernels = {name: proof.text for name, proof in proofs(findings).items()}
    table, constant = folded(_table(cells, kernels))
    blocks: list[Block] = []
    if constant:
        blocks.append(Paragraph(f"In every cell: {constant}."))
    blocks += [TableBlock(table), Paragraph(_MEANING, tone="note")]
    return Section("collectives", "Collectives", tuple(blocks))


def memory_of(cell: Cell) -> str:
    """How its memory is registered, as `symmetric, copy engine`."""
    collective = cell.resolved.collective
    registration = "" if collective is None else collective.registration
    return registration + (", copy engine" if cell.resolved.launch.copy_engine else "")


def best_bandwidths(findings: Findings) -> str:
    """A sentence with the highest bus bandwidth of each operation; "" without collectives."""
    best: dict[str, tuple[float, str]] = {}
    for cell in findings.measured:
        collective, value = cell.resolved.collective, cell.value(BUS_BANDWIDTH)
        if collective is not None and value is not None:
            found = value, cell.name
            best[collective.operation] = max(best.get(collective.operation, found), found)
    if not best:
        return ""
    texts = (
        f"{operation} {quantity.gigabytes_per_second(value * 1e9)} ({name})"
        for operation, (value, name) in best.items()
    )
    return f"Highest bus bandwidth: {'; '.join(texts)}."


def _table(cells: list[Cell], kernels: Mapping[str, str]) -> Table:
    more = ("NCCL kernel",) if kernels else ()
    rows = []
    for cell in cells:
        texts = [*_names(cell), str(cell.n), *_numbers(cell)]
        if kernels:
            texts.append(kernels.get(cell.name, quantity.MISSING))
        rows.append(tuple(texts))
    return Table.of((*_NAMES, "n", *_NUMBERS, *more), rows, left=len(_NAMES))


def _names(cell: Cell) -> list[str]:
    resolved, collective = cell.resolved, cell.resolved.collective
    if collective is None:
        return [cell.name, *[quantity.MISSING] * (len(_NAMES) - 1)]
    return [
        cell.name,
        collective.operation,
        quantity.binary_bytes(collective.size_bytes),
        resolved.dtypes.compute,
        memory_of(cell),
        collective.transport,
        str(resolved.launch.ranks),
    ]


def _numbers(cell: Cell) -> list[str]:
    times = [cell.value(metric) for metric in (STEP_TIME, LATENCY)]
    rates = [cell.value(metric) for metric in (ALGORITHM_BANDWIDTH, BUS_BANDWIDTH)]
    microseconds = [None if one is None else one * 1e3 for one in times]
    return [quantity.significant(one) for one in (*microseconds, *rates)]
