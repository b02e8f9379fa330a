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
from reports.renderers.document import Block, Bullets, Heading, Paragraph, Section, TableBlock
from reports.views.sweep_view import SweepView, base_arm


def arms_section(store: ResultsStore, sweeps: Sequence[SweepView]) -> Section | None:
    """Every other arm against the first; None where no cell has a block that counts."""
    blocks: list[Block] = []
    for judged in _judged(store, sweeps):
        tables = [table(judged.judgements) for table in (time_table, other_table)]
        blocks.append(Heading(f"{judged.sides.head} against {judged.sides.base}"))
        blocks += [TableBlock(table) for table in tables if table.rows]
        blocks.append(Bullets(tuple(remarks(judged, datetime.now(UTC)))))
    if not blocks:
        return None
    introduction = (
        "Runs of one block are compared with each other; base is the arm that is named last. "
        f"Method: {METHOD}."
    )
    return Section("arms", "Arms, block by block", (Paragraph(introduction), *blocks))


def _judged(store: ResultsStore, sweeps: Sequence[SweepView]) -> list[GateResult]:
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
