"""In which dtype gradients were added up: by the record's version and nodes, and by NCCL's log."""

from __future__ import annotations

from reports.findings import Findings
from reports.nccl.expectations import steady_rows
from reports.nccl.sums import gradient_sums
from reports.renderers.document import Paragraph, Section, TableBlock
from reports.renderers.table import Table
from reports.sections.nccl import audits


def gradient_sums_section(findings: Findings) -> Section | None:
    """None where no finished cell sends gradients in 16 bits through NCCL."""
    rows = []
    for cell, _, audit in audits(findings):
        if not cell.finished:
            continue
        version = cell.finished[0].record.runtime.get("nccl")
        logged = [] if audit is None else steady_rows(cell.resolved, audit)
        sums = gradient_sums(cell.resolved, version if isinstance(version, str) else None, logged)
        rows += [
            (
                cell.name,
                str(version or "unknown"),
                one.axis,
                one.text,
                one.sent,
                one.summed,
                one.why,
            )
            for one in sums
        ]
    if not rows:
        return None
    introduction = (
        "NCCL adds up gradients that travel in 16 bits in FP32 only in symmetric kernels: within "
        "one NVLink domain from 2.27.3 on, reduce-scatter over several nodes from 2.29.7 on, "
        "all-reduce over several nodes never. Unknown is an answer."
    )
    table = Table.of("cell | NCCL | axis | reduction | sent as | summed in | why", rows, left=7)
    return Section("sums", "Gradient sums", (Paragraph(introduction), TableBlock(table)))
