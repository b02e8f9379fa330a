"""Loss parity: verdict per cell, and how its bound was chosen."""

from __future__ import annotations

from collections.abc import Iterator

from reports.compare.parity import ParityGroup, ParityRow, wire_verdicts
from reports.compare.series import NORMS
from reports.findings import Findings
from reports.plots.loss import loss_figure, most_different
from reports.plots.style import looks
from reports.renderers import quantity
from reports.renderers.document import Block, Figure, Paragraph, TableBlock, note
from reports.renderers.table import Row, RowKind, Table


def parity_section(findings: Findings) -> Iterator[Block]:
    """One table over all dtype policies, the bounds in words, the curves."""
    if not findings.parity:
        yield Paragraph("No cell has a finished run.")
        return
    yield Paragraph(
        "Cells with the same model, data, batch, optimizer and dtype policy should report the "
        "same losses and gradient norms. Each is compared step by step with the reference cell "
        "of its policy; it is in parity if the relative difference of losses stays within the "
        "bound at every step, and that of gradient norms at the first step, where all weights "
        "are equal, and its median over the steps within ten times the bound. Other start: its "
        "weights began with other bits, so that nothing else is compared."
    )
    titles = (
        "cell | dtype policy | verdict | steps compared | max relative difference | at step"
        " | bound | gradient norm, step 1 | gradient norm, median | its bound"
        " | first divergent step"
    )
    rows = (_row(group, row) for group in findings.parity for row in group.rows)
    yield TableBlock(Table.of(titles, rows, left=3))
    for group in findings.parity:
        yield note(" ".join(_explained(group)))
    for group in findings.wires:
        good = all(row.verdict == "parity" for row in group.compared)
        text = f"Across dtypes of gradients, against {group.reference.name}"
        yield Paragraph(
            f"{text}: {'; '.join(wire_verdicts(group))}.", "plain" if good else "warning"
        )
    shown = most_different(findings.parity)
    caption = (
        "Left: mean loss over ranks. Right: relative difference from the policy's reference cell, "
        "with the bound; exact agreement is drawn at the bottom."
    )
    drawn, all_of = (sum(len(group.rows) for group in g) for g in (shown, findings.parity))
    if drawn < all_of:
        caption += f" Shown are {drawn} of {all_of} cells, those that differ most."
    yield Figure("loss", loss_figure(shown, looks(findings.cells)), caption)


def _row(group: ParityGroup, row: ParityRow) -> Row:
    bad = ("diverges", "steps differ", "other start")
    kinds: dict[str, RowKind] = {"reference": "reference", **dict.fromkeys(bad, "bad")}
    bound, norm_bound = (f"{bound:.1e}" for bound in NORMS.bounds(group.tolerance.bound))
    missing = quantity.MISSING
    compared, first = [missing] * 4, missing
    if row.max_relative is not None:
        worst = str(row.at_step) if row.max_relative else missing
        compared = [str(row.steps), quantity.difference(row.max_relative), worst, bound]
        first = str(row.first_divergent_step or "none")
    norms = [*map(quantity.difference, row.norms), norm_bound] if row.norms else [missing] * 3
    texts = (row.cell.name, group.label, row.verdict, *compared, *norms, first)
    return Row(texts, kinds.get(row.verdict, "plain"))


def _explained(group: ParityGroup) -> Iterator[str]:
    bound, spread = group.tolerance.bound, group.observed_spread
    yield f"{group.label}: reference {group.reference.name}."
    yield f"Bound {bound:.2e}: {group.tolerance.derivation}."
    if len(group.sums) > 1:
        each = (f"{dtype} in {', '.join(names)}" for dtype, names in group.sums.items())
        yield f"The group differs in the precision of sums over ranks: {'; '.join(each)}."
    if spread is not None:
        part = f", {quantity.share(spread / bound)} of the bound" if 0 < spread <= bound else ""
        yield f"Observed among the engines: {quantity.difference(spread)}{part}."
    if group.repeat_spread is not None:
        yield f"Repeats of one cell differ by up to {quantity.difference(group.repeat_spread)}."
