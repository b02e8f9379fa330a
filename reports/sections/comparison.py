"""Every measured cell against one reference cell, arms block by block, and imported runs."""

from __future__ import annotations

from collections.abc import Iterator

from bench.errors import DamagedRecordError
from reports.compare.change import change_table, flag_table
from reports.compare.logs import CAPTION, absences, of_cell, of_import, side_by_side
from reports.compare.published import CAPTION as PUBLISHED
from reports.compare.published import published
from reports.compare.text import METHOD, verdict_blocks
from reports.findings import Findings
from reports.plots.memory import MOST_CELLS, memory_figure
from reports.plots.style import looks
from reports.plots.throughput import MOST_NAMES, throughput_figure
from reports.renderers import quantity
from reports.renderers.document import (
    Block,
    Bullets,
    Figure,
    Heading,
    Paragraph,
    TableBlock,
    folded_blocks,
    note,
    warning,
)
from reports.sections.validation import verdict_lines
from reports.views.reference import rule_for


def comparison(findings: Findings) -> Iterator[Block]:
    """Speed and memory against the reference."""
    if not findings.measured:
        yield Paragraph("No cell was measured, so there is nothing to compare.")
    else:
        yield Paragraph(" ".join(_introduction(findings)))
        if findings.not_in_blocks:
            yield from folded_blocks(change_table(findings.not_in_blocks))
            yield note(_sample_sizes(findings))
        elif not findings.changes:
            yield Paragraph("There is no other cell to compare it with.")
        if timeless := [cell.name for cell in findings.without_a_time]:
            yield note(f"In no row, for want of a time: {', '.join(timeless)} (see Cells).")
    engines = dict.fromkeys(cell.resolved.engine.name for cell in findings.measured)
    if verdicts := verdict_lines(findings.store, engines):
        yield Bullets(verdicts)
    if findings.other_hardware:
        names = ", ".join(cell.name for cell in findings.other_hardware)
        yield warning(f"Not compared, because measured on other hardware: {names}.")
    if findings.changes:
        yield Heading("Trade-offs")
        if findings.flags:
            yield from folded_blocks(flag_table(findings.flags))
        else:
            yield Paragraph("None beyond the thresholds (see How to read the numbers).")
    yield from _figures(findings)


def _introduction(findings: Findings) -> Iterator[str]:
    if findings.reference is not None:
        named = findings.reference_was_named
        chosen = "named by the reader" if named else f"chosen by rule: {rule_for(findings.cells)}"
        yield f"Reference: {findings.reference.name} ({chosen})."
    arms = {c.base.arm: None for c in findings.changes if c.base is not findings.reference}
    if arms:
        names = ", ".join(str(arm) for arm in arms)
        above = "" if findings.not_in_blocks else ", block by block: see above"
        yield f"Arms are compared within their cell, with the arm {names} of the same cell{above}."
    if findings.not_in_blocks:
        yield (
            "Changes are of the cell against the reference: time change is step time over the "
            "reference's minus 1, throughput change is tokens/s over the reference's minus 1, "
            "throughput ratio is tokens/s over the reference's."
        )


def _sample_sizes(findings: Findings) -> str:
    changes = findings.not_in_blocks
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


def _figures(findings: Findings) -> Iterator[Block]:
    finished, measured, metric = findings.finished, findings.measured, findings.memory_metric
    if finished:
        caption = (
            "Memory by category (ledger of rank 0; activations are known from profiled runs only) "
            "and the peak of the largest rank."
        )
        caption += quantity.first_of(MOST_CELLS, len(finished))
        yield Figure("memory", memory_figure(finished), caption)
    if measured and metric is not None:
        caption = f"Throughput against {metric.title}; up and to the left is better."
        if len(measured) > MOST_NAMES:
            caption += f" Of {len(measured)} cells the front and the fastest are named."
        drawn = throughput_figure(measured, metric, looks(findings.cells))
        yield Figure("throughput-memory", drawn, caption)


def arms_section(findings: Findings) -> Iterator[Block]:
    """Every other arm against the first; nothing where no cell has a block that counts."""
    if findings.judged:
        yield Paragraph(
            "Runs of one block are compared with each other; base is the arm that is named last. "
            f"Method: {METHOD}."
        )
    for judged in findings.judged:
        yield Heading(f"{judged.sides.head} against {judged.sides.base}")
        yield from verdict_blocks(judged, explained=False)[1:]


def imported_section(findings: Findings) -> Iterator[Block]:
    """Nothing where nothing was imported, and nothing was published of a measured cell."""
    imports, shown, damaged = findings.store.imports, [], []
    for name in imports.ids():
        try:
            shown.append(of_import(imports.read(name)))
        except DamagedRecordError as error:
            damaged.append((name, str(error)))
    theirs = [*published(findings.finished)]
    if shown or damaged or theirs:
        table = side_by_side([*shown, *theirs, *map(of_cell, findings.finished)])
        yield TableBlock(table, f"{PUBLISHED if theirs else ''} {CAPTION}".lstrip())
    if missing := absences(shown):
        yield Paragraph("The logs do not say:")
        yield Bullets(tuple(missing))
    if damaged:
        yield warning("Damaged imports, of which no number is used:")
        yield Bullets(tuple(damaged))
