"""Every measured cell against one reference cell, arms block by block, and imported runs."""

from __future__ import annotations

from collections.abc import Sequence

from bench.store import DamagedRecordError
from reports.compare.change import Change, change_table, flag_table
from reports.compare.logs import CAPTION, absences, of_cell, of_import, side_by_side
from reports.compare.text import METHOD, verdict_blocks
from reports.findings import Findings
from reports.plots.memory import MOST_CELLS, memory_figure
from reports.plots.style import looks
from reports.plots.throughput import MOST_NAMES, throughput_figure
from reports.renderers.document import (
    Block,
    Bullets,
    Figure,
    Heading,
    Paragraph,
    Section,
    TableBlock,
)
from reports.renderers.table import folded
from reports.sections.validation import verdict_lines
from reports.views.reference import rule_for


def comparison(findings: Findings) -> Section:
    """Speed and memory against the reference."""
    blocks: list[Block] = []
    if not findings.measured:
        blocks.append(Paragraph("No cell was measured, so there is nothing to compare."))
    else:
        blocks.append(Paragraph(_introduction(findings)))
        if findings.not_in_blocks:
            table, constant = folded(change_table(findings.not_in_blocks))
            if constant:
                blocks.append(Paragraph(f"In every row: {constant}."))
            blocks.append(TableBlock(table))
            blocks.append(Paragraph(_sample_sizes(findings.not_in_blocks), tone="note"))
        elif not findings.changes:
            blocks.append(Paragraph("There is no other cell to compare it with."))
    engines = dict.fromkeys(cell.resolved.engine.name for cell in findings.measured)
    verdicts = verdict_lines(findings.store, engines)
    if verdicts:
        blocks.append(Bullets(verdicts))
    if findings.other_hardware:
        names = ", ".join(cell.name for cell in findings.other_hardware)
        blocks.append(
            Paragraph(f"Not compared, because measured on other hardware: {names}.", tone="warning")
        )
    blocks.extend(_flags(findings))
    blocks.extend(_figures(findings))
    return Section("comparison", "Comparison", tuple(blocks))


def _introduction(findings: Findings) -> str:
    references = []
    if findings.reference is not None:
        named = findings.reference_was_named
        chosen = "named by the reader" if named else f"chosen by rule: {rule_for(findings.cells)}"
        references.append(f"Reference: {findings.reference.name} ({chosen}).")
    arms = {c.base.arm: None for c in findings.changes if c.base is not findings.reference}
    if arms:
        names = ", ".join(str(arm) for arm in arms)
        above = "" if findings.not_in_blocks else ", block by block: see above"
        references.append(
            f"Arms are compared within their cell, with the arm {names} of the same cell{above}."
        )
    if findings.not_in_blocks:
        references.append(
            "Changes are of the cell against the reference: time change is step time over the "
            "reference's minus 1, throughput change is tokens/s over the reference's minus 1, "
            "throughput ratio is tokens/s over the reference's."
        )
    return " ".join(references)


def _sample_sizes(changes: Sequence[Change]) -> str:
    single = sum(min(c.base.n, c.head.n) == 1 for c in changes)
    if single == len(changes):
        return (
            "n=1 in every comparison: one run on each side, so there is no interval and no "
            "verdict. A difference may be noise of the machine."
        )
    if single:
        return (
            f"n=1 on a side of {single} of {len(changes)} comparisons: no interval there. Medians "
            "of several runs elsewhere; verdicts need a noise floor and are not given here."
        )
    return "Medians over runs; verdicts need a noise floor and are not given here."


def _flags(findings: Findings) -> list[Block]:
    if not findings.changes:
        return []
    heading = Heading("Trade-offs")
    if not findings.flags:
        return [heading, Paragraph("None beyond the thresholds (see How to read the numbers).")]
    table, alike = folded(flag_table(findings.flags))
    said: list[Block] = [Paragraph(f"In every row: {alike}.")] if alike else []
    return [heading, *said, TableBlock(table)]


def _figures(findings: Findings) -> list[Block]:
    figures: list[Block] = []
    if findings.finished:
        caption = (
            "Memory by category (ledger of rank 0; activations are known from profiled runs only) "
            "and the peak of the largest rank."
        )
        if len(findings.finished) > MOST_CELLS:
            caption += f" The first {MOST_CELLS} of {len(findings.finished)} cells are drawn."
        figures.append(Figure("memory", memory_figure(findings.finished), caption))
    metric = findings.memory_metric
    trained = findings.measured
    if trained and metric is not None:
        svg = throughput_figure(trained, metric, looks(findings.cells))
        caption = f"Throughput against {metric.title}; up and to the left is better."
        if len(trained) > MOST_NAMES:
            caption += f" Of {len(trained)} cells the front and the fastest are named."
        figures.append(Figure("throughput-memory", svg, caption))
    return figures


def arms_section(findings: Findings) -> Section | None:
    """Every other arm against the first; None where no cell has a block that counts."""
    blocks: list[Block] = []
    for judged in findings.judged:
        blocks.append(Heading(f"{judged.sides.head} against {judged.sides.base}"))
        blocks += verdict_blocks(judged, explained=False)[1:]
    if not blocks:
        return None
    introduction = (
        "Runs of one block are compared with each other; base is the arm that is named last. "
        f"Method: {METHOD}."
    )
    return Section("arms", "Arms, block by block", (Paragraph(introduction), *blocks))


def imported_section(findings: Findings) -> Section | None:
    """None where nothing was imported."""
    if not (ids := findings.store.imports.ids()):
        return None
    shown, damaged = [], []
    for name in ids:
        try:
            shown.append(of_import(findings.store.imports.read(name)))
        except DamagedRecordError as error:
            damaged.append((name, str(error)))
    table = side_by_side([*shown, *map(of_cell, findings.finished)])
    blocks: list[Block] = [TableBlock(table, CAPTION)]
    if missing := absences(shown):
        blocks += [Paragraph("The logs do not say:"), Bullets(tuple(missing))]
    if damaged:
        text = "Damaged imports, of which no number is used:"
        blocks += [Paragraph(text, tone="warning"), Bullets(tuple(damaged))]
    return Section("imported", "Imported runs", tuple(blocks))
