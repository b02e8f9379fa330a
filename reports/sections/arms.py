"""Two arms of a sweep, block by block: the tables of `compare` with intervals and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from bench.errors import UsageError
from bench.store import ResultsStore
from reports.gates.gate import GateResult, gate
from reports.gates.gate_table import other_table, time_table
from reports.gates.gate_text import METHOD, remarks
from reports.gates.noise import calibrations
from reports.gates.pairing import Sides, sides_of_arms
from reports.gates.policy import Policy
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
from reports.views.sweep_view import SweepView, base_arm


def arms_section(store: ResultsStore, sweeps: Sequence[SweepView]) -> Section | None:
    """Every other arm against the first; None where no cell has a block that counts."""
    blocks: list[Block] = []
    for judged in judged_arms(store, sweeps):
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


def judged_arms(store: ResultsStore, sweeps: Sequence[SweepView]) -> list[GateResult]:
    """By the default policy, as `compare` does; not where nothing can be compared."""
    found = []
    for sweep in sweeps:
        for head in sweep.arms:
            base = base_arm(sweep.arms)
            if head == base:
                continue
            try:
                sides = sides_of_arms(store, sweep.id, base, head)
            except UsageError:  # the plan cannot be read; the section on what is missing says so
                continue
            if sides.pairs:
                found.append(_gate(store, sides))
    return [judged for judged in found if not judged.nothing_comparable]


def _gate(store: ResultsStore, sides: Sides) -> GateResult:
    try:
        return gate(sides, Policy(), calibrations(store))
    except UsageError as error:  # a damaged calibration does not cost the report
        judged = gate(sides, Policy(), lambda _: None)
        return replace(judged, notes=(*judged.notes, f"the noise calibration: {error}"))
