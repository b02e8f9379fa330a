"""Two arms of a sweep, block by block: the tables of `compare` with intervals and verdicts."""

from __future__ import annotations

from datetime import UTC, datetime

from reports.findings import Findings
from reports.gates.gate_table import other_table, time_table
from reports.gates.gate_text import METHOD, remarks
from reports.gates.pairing import Sides
from reports.gates.spread import spread_of, spread_text
from reports.plots.block_spread import block_spread_figure
from reports.renderers.document import (
    Block,
    Bullets,
    Figure,
    Heading,
    Paragraph,
    Section,
    TableBlock,
)


def arms_section(findings: Findings) -> Section | None:
    """Every other arm against the first; None where no cell has a block that counts."""
    blocks: list[Block] = []
    for judged in findings.judged:
        tables = [table(judged.judgements) for table in (time_table, other_table)]
        blocks.append(Heading(f"{judged.sides.head} against {judged.sides.base}"))
        blocks += [TableBlock(table) for table in tables if table.rows]
        blocks += _drawn(judged.sides, len(blocks))
        notes = (*remarks(judged, datetime.now(UTC)), *_spreads(judged.sides))
        blocks.append(Bullets(notes))
    if not blocks:
        return None
    introduction = (
        "Runs of one block are compared with each other; base is the arm that is named last. "
        f"Method: {METHOD}."
    )
    return Section("arms", "Arms, block by block", (Paragraph(introduction), *blocks))


def _drawn(sides: Sides, number: int) -> list[Block]:
    """The runs of both arms, block by block."""
    name = f"block-spread-{number}"
    figure = block_spread_figure(name, sides.pairs, (sides.base, sides.head))
    caption = (
        "Medians of runs against the median of base, block by block; at the right edge the same as "
        "a strip, where slow launches form a heap of their own."
    )
    return [] if figure is None else [Figure(name, figure, caption)]


def _spreads(sides: Sides) -> list[tuple[str, str]]:
    found = [(pair.label, spread_of(pair)) for pair in sides.pairs]
    return [
        ("spread", f"{label}: {spread_text(spread, None)}")
        for label, spread in found
        if spread is not None
    ]
