"""How the two data-parallel axes of hybrid cells lie on the nodes."""

from __future__ import annotations

from collections.abc import Sequence

from reports.findings import Findings
from reports.renderers.document import Paragraph, Section
from reports.views.cells import Cell


def nodes_section(findings: Findings) -> Section | None:
    """None where no hybrid cell ran on several nodes."""
    axes = [text for cell in findings.finished if (text := axes_of(cell))]
    return Section("nodes", "Nodes", tuple(map(Paragraph, axes))) if axes else None


def axes_of(cell: Cell) -> str:
    """How the two data-parallel axes of a hybrid cell lie on its nodes; "" for other cells."""
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
