"""Collectives by themselves: times, bandwidths, and the kernel that ran."""

from __future__ import annotations

from bench.derive.metrics import ALGORITHM_BANDWIDTH, BUS_BANDWIDTH, LATENCY, STEP_TIME
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Paragraph, Section, TableBlock
from reports.renderers.table import Table, folded
from reports.sections.nccl import proofs

_MEANING = (
    "Medians over the steady steps of a run, and over runs where a cell has several. A step is "
    "several operations in a row; its time is that of one of them, until the slowest rank is "
    "done. Latency: of one operation that the host waits for. Algorithm bandwidth: size over time. "
    "Bus bandwidth: what each link carries, by the formulas of nccl-tests (doc/PERFORMANCE.md): "
    "(n-1)/n of that for all_gather and reduce_scatter of n ranks, twice as much for all_reduce, "
    "all of it for broadcast. Every step also checked the values of one operation to the last bit."
)
_TITLES = (
    "cell | operation | size | dtype | memory | transport | ranks | n | time (us) | latency (us)"
    " | algorithm GB/s | bus GB/s"
)


def collectives_section(findings: Findings) -> Section | None:
    """None where no collective has a time."""
    kernels = {name: proof.text for name, proof in proofs(findings).items()}
    rows = []
    for cell in findings.measured:
        resolved, one = cell.resolved, cell.resolved.collective
        if one is None:
            continue
        times = [cell.value(metric) for metric in (STEP_TIME, LATENCY)]
        rates = [cell.value(metric) for metric in (ALGORITHM_BANDWIDTH, BUS_BANDWIDTH)]
        microseconds = [None if time is None else time * 1e3 for time in times]
        texts = (
            cell.name,
            one.operation,
            quantity.binary_bytes(one.size_bytes),
            resolved.dtypes.compute,
            one.registration + (", copy engine" if resolved.launch.copy_engine else ""),
            one.transport,
            str(resolved.launch.ranks),
            str(cell.n),
            *(quantity.significant(number) for number in (*microseconds, *rates)),
        )
        own = (kernels.get(cell.name, quantity.MISSING),) if kernels else ()
        rows.append((*texts, *own))
    if not rows:
        return None
    titles = _TITLES + (" | NCCL kernel" if kernels else "")
    table, constant = folded(Table.of(titles, rows, left=7))
    blocks: list[Block] = []
    if constant:
        blocks.append(Paragraph(f"In every cell: {constant}."))
    blocks += [TableBlock(table), Paragraph(_MEANING, tone="note")]
    return Section("collectives", "Collectives", tuple(blocks))


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
