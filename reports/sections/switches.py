"""What a switch of the engine changes: numbers to the last bit, and memory."""

from __future__ import annotations

from reports import quantity
from reports.document import Block, Heading, Paragraph, Section, TableBlock
from reports.findings import Findings
from reports.switches import Difference, SwitchGroup, setting_text, switch_groups
from reports.table import Row, Table, columns

_EXPLANATIONS = {
    "allocator": (
        "An allocator decides where buffers lie and when their memory is free, never what is in "
        "them: losses and gradient norms must have the same bits in every cell."
    ),
    "transport": (
        "point_to_point sends gradients in their communication dtype and adds them up locally in "
        "FP32, in the order of ranks; native leaves order and rounding of the sum to the backend. "
        "The gradient norm of the first step, where both have the same weights, shows the rounding "
        "of one reduction; later steps show what training makes of it."
    ),
}
_TITLES = {"allocator": "Allocators", "transport": "Reducers"}


def switches_section(findings: Findings) -> Section | None:
    """None where no two cells differ in one switch only."""
    groups = switch_groups(findings.finished)
    if not groups:
        return None
    blocks: list[Block] = []
    for switch, title in _TITLES.items():
        same = [group for group in groups if group.switch == switch]
        if same:
            blocks += [Heading(title), Paragraph(_EXPLANATIONS[switch])]
            blocks += [TableBlock(_table(group)) for group in same]
    return Section("switches", "One switch at a time", tuple(blocks))


def switch_sentences(findings: Findings) -> list[str]:
    """For the headline: whether allocators agree to the last bit, and what memory they take."""
    return [_agreement(group) for group in switch_groups(findings.finished) if group.must_agree]


def _agreement(group: SwitchGroup) -> str:
    cells = (group.base, *group.others)
    broken = [found.cell.name for found in group.others if not found.exact]
    same = (
        f"not the same bits in {', '.join(broken)} as in {group.base.cell.name}"
        if broken
        else f"the same bits in {quantity.counted(len(cells), 'cell')}"
    )
    text = f"{_TITLES[group.switch]}: losses and gradient norms have {same}"
    peaks = [found for found in cells if found.peak_bytes is not None]
    if not peaks:
        return f"{text}."
    low, high = (choose(peaks, key=lambda found: found.peak_bytes or 0) for choose in (min, max))
    return (
        f"{text}; memory peak of a step from {quantity.binary_bytes(low.peak_bytes)} "
        f"({low.cell.name}) to {quantity.binary_bytes(high.peak_bytes)} ({high.cell.name})."
    )


def _table(group: SwitchGroup) -> Table:
    titles = columns(
        "cell",
        group.switch,
        "losses and gradient norms",
        "loss differs by",
        "grad norm, step 1",
        "grad norm, any step",
        "memory peak of a step",
        left=3,
    )
    rows = [_row(group.base, group, "reference")]
    rows += [_row(other, group, None) for other in group.others]
    return Table(titles, tuple(rows))


def _row(found: Difference, group: SwitchGroup, role: str | None) -> Row:
    if role is not None:
        verdict = "compared with"
    else:
        verdict = "the same bits" if found.exact else "not the same bits"
    broken = role is None and not found.exact and group.must_agree
    texts = (
        found.cell.name,
        setting_text(found.cell, group.switch),
        verdict,
        quantity.MISSING if role else quantity.difference(found.loss),
        quantity.MISSING if role else quantity.difference(found.first_grad_norm),
        quantity.MISSING if role else quantity.difference(found.grad_norm),
        quantity.binary_bytes(found.peak_bytes),
    )
    return Row(texts, "bad" if broken else "plain")
