"""Loss parity: verdict per cell, and how its bound was chosen."""

from __future__ import annotations

from reports.compare.parity import NORMS, ParityGroup, ParityRow, wire_verdicts
from reports.findings import Findings
from reports.plots.loss import loss_figure, most_different
from reports.plots.style import looks
from reports.renderers import quantity
from reports.renderers.document import Block, Figure, Paragraph, Section, TableBlock
from reports.renderers.table import Row, RowKind, Table


def parity_section(findings: Findings) -> Section:
    """One table over all dtype policies, the bounds in words, the curves."""
    if not findings.parity:
        return Section("parity", "Loss parity", (Paragraph("No cell has a finished run."),))
    blocks: list[Block] = [
        Paragraph(
            "Cells with the same model, data, batch, optimizer and dtype policy should report the "
            "same losses and gradient norms. Each is compared step by step with the reference cell "
            "of its policy; it is in parity if the relative difference of losses stays within the "
            "bound at every step, and that of gradient norms at the first step, where all weights "
            "are equal, and its median over the steps within ten times the bound. Other start: its "
            "weights began with other bits, so that nothing else is compared."
        ),
        TableBlock(parity_table(findings.parity)),
    ]
    blocks.extend(Paragraph(_explained(group), tone="note") for group in findings.parity)
    blocks.extend(_across_dtypes(group) for group in findings.wires)
    shown = most_different(findings.parity)
    svg = loss_figure(shown, looks(findings.cells))
    caption = (
        "Left: mean loss over ranks. Right: relative difference from the policy's reference cell, "
        "with the bound; exact agreement is drawn at the bottom."
    )
    drawn, all_of = (sum(len(group.rows) for group in g) for g in (shown, findings.parity))
    if drawn < all_of:
        caption += f" Shown are {drawn} of {all_of} cells, those that differ most."
    blocks.append(Figure("loss", svg, caption))
    return Section("parity", "Loss parity", tuple(blocks))


def parity_table(groups: tuple[ParityGroup, ...]) -> Table:
    """All groups in one table, their reference cells set off."""
    return Table.of(
        "cell | dtype policy | verdict | steps compared | max relative difference | at step"
        " | bound | gradient norm, step 1 | gradient norm, median | its bound"
        " | first divergent step",
        (_row(group, row) for group in groups for row in group.rows),
        left=3,
    )


def _across_dtypes(group: ParityGroup) -> Paragraph:
    """Cells of one model and batch that keep, send or add up gradients in other dtypes."""
    good = all(row.verdict == "parity" for row in group.compared)
    text = f"Across dtypes of gradients, against {group.reference.name}"
    verdicts = "; ".join(wire_verdicts(group))
    return Paragraph(f"{text}: {verdicts}.", tone="plain" if good else "warning")


def _row(group: ParityGroup, row: ParityRow) -> Row:
    bad = ("diverges", "steps differ", "other start")
    kinds: dict[str, RowKind] = {"reference": "reference", **dict.fromkeys(bad, "bad")}
    compared = row.max_relative is not None
    texts = (
        row.cell.name,
        group.label,
        row.verdict,
        str(row.steps) if compared else quantity.MISSING,
        quantity.difference(row.max_relative),
        str(row.at_step) if compared and row.max_relative else quantity.MISSING,
        f"{group.tolerance.bound:.1e}" if compared else quantity.MISSING,
        *map(quantity.difference, row.norms or (None, None)),
        f"{NORMS.bounds(group.tolerance.bound)[1]:.1e}" if row.norms else quantity.MISSING,
        str(row.first_divergent_step or "none") if compared else quantity.MISSING,
    )
    return Row(texts, kinds.get(row.verdict, "plain"))


def _explained(group: ParityGroup) -> str:
    text = (
        f"{group.label}: reference {group.reference.name}. Bound {group.tolerance.bound:.2e}: "
        f"{group.tolerance.derivation}."
    )
    if len(group.sums) > 1:
        each = (f"{dtype} in {', '.join(names)}" for dtype, names in group.sums.items())
        text += f" The group differs in the precision of sums over ranks: {'; '.join(each)}."
    spread = group.observed_spread
    if spread is not None:
        text += f" Observed among the engines: {quantity.difference(spread)}"
        if 0 < spread <= group.tolerance.bound:
            text += f", {quantity.share(spread / group.tolerance.bound)} of the bound"
        text += "."
    if group.repeat_spread is not None:
        text += f" Repeats of one cell differ by up to {quantity.difference(group.repeat_spread)}."
    return text
