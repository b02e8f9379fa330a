"""Where ranks were, how far nodes differ, and which of them a sweep waited for."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.derive.stragglers import Lag, RankSpread, spread
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Paragraph, Section, TableBlock
from reports.renderers.table import Table
from reports.views.cells import Cell, Run

_CAPTION = (
    "Over the steady runs of all cells. A step waits for its slowest rank, so that the others' "
    "times hide most of what a slow one costs; being last too often is what shows it. "
    "Relative time: of the node's slowest rank to the median rank of the same step."
)


_Seen = tuple[Cell, Run, RankSpread]
"""One steady run and its spread."""


def nodes_section(findings: Findings) -> Section | None:
    """None for runs on one node without a rank that is last too often."""
    seen = [
        (cell, run, found)
        for cell in findings.measured
        for run in cell.measured
        if run.summary.steady is not None
        and (found := spread(run.record, run.summary.steady)) is not None
    ]
    axes = [text for cell in findings.finished if (text := axes_of(cell))]
    named = [sentence for one in seen if (sentence := _sentence(*one))]
    blocks: list[Block] = [Paragraph(sentence) for sentence in named]
    table = _table(seen)
    if table is not None:
        blocks.insert(0, TableBlock(table, _CAPTION))
        if not named:
            blocks.append(Paragraph("No node and no rank was last more often than equal ones are."))
    blocks += [Paragraph(text) for text in axes]
    return Section("nodes", "Nodes and stragglers", tuple(blocks)) if blocks else None


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


def _sentence(cell: Cell, run: Run, spread_: RankSpread) -> str:
    """The stragglers of one run."""
    if not spread_.stragglers:
        return ""
    return f"{cell.name} (repeat {run.record.status.repeat}): " + "; ".join(
        f"{lag.name} was last in {lag.last} of {lag.steps} steps (equal ranks:"
        f" {lag.expected:.0f}), by {quantity.significant(lag.lag_milliseconds)} ms in the median"
        for lag in spread_.stragglers
    )


def _table(seen: list[_Seen]) -> Table | None:
    by_node: dict[str, list[Lag]] = {}
    for *_, found in seen:
        for lag in found.nodes:
            by_node.setdefault(lag.name.removeprefix("node "), []).append(lag)
    if not by_node:
        return None
    rows = (
        (
            node,
            str(len(lags)),
            str(max(lag.ranks for lag in lags)),
            f"{_slowness(lags):.4f}",
            f"{sum(lag.last for lag in lags)} of {sum(lag.steps for lag in lags)}",
            str(sum(lag.is_straggler for lag in lags)),
        )
        for node, lags in sorted(by_node.items(), key=lambda item: -_slowness(item[1]))
    )
    titles = "node | runs | ranks | relative time | last in steps | straggler in runs"
    return Table.of(titles, rows)


def _relative(lag: Lag) -> float:
    others = lag.milliseconds - lag.lag_milliseconds
    return lag.milliseconds / others if others > 0 else 1.0


def _slowness(lags: list[Lag]) -> float:
    return median(_relative(lag) for lag in lags)
