"""What a switch of the engine changes: numbers to the last bit, and memory."""

from __future__ import annotations

from reports.comparisons.switches import SwitchDifference, SwitchGroup, setting_text, switch_groups
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Heading, Paragraph, Section, TableBlock
from reports.renderers.table import Row, Table

_EXPLANATIONS = {
    "allocator": (
        "An allocator decides where buffers lie and when their memory is free, never what is in "
        "them: losses and gradient norms must have the same bits in every cell."
    ),
    "transport": (
        "point_to_point sends gradients in their communication dtype and adds them up locally in "
        "FP32, in the order of ranks; native leaves order and rounding of the sum to the backend. "
        "The gradient norm of the first step, where both have the same weights, shows the rounding "
        "of one reduction; later steps show what training makes of it. Runs do not record the "
        "exact sum: that point_to_point is the FP32 sum of the BF16 contributions, bit by bit, on "
        "2 and 4 ranks, is what tests/core/test_oracle_dtypes.py checks."
    ),
    "gather_precision": (
        "Weights gathered as codes of their recipe, or in the compute dtype and quantised on "
        "arrival with the same scales, are the same weights: losses and gradient norms must have "
        "the same bits in every cell. What differs is what travels."
    ),
    "fine_grained_gather": (
        "Gathering by module or by unit decides when weights arrive, never what is in them: losses "
        "and gradient norms must have the same bits in every cell."
    ),
}
_TITLES = {
    "allocator": "Allocators",
    "transport": "Reducers",
    "fine_grained_gather": "Gathering by module",
    "gather_precision": "Gathers of quantised weights",
}


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
    """For the headline: whether allocators agree to the last bit, by how much reducers differ."""
    groups = switch_groups(findings.finished)
    sentences = [_agreement(group) for group in groups if group.must_agree]
    return sentences + _distances([group for group in groups if not group.must_agree])


def _distances(groups: list[SwitchGroup]) -> list[str]:
    """One sentence per gradient communication dtype, the largest difference of its groups."""
    by_dtype: dict[str, list[SwitchGroup]] = {}
    for group in groups:
        by_dtype.setdefault(group.base.cell.resolved.dtypes.grad_comm, []).append(group)
    return [_distance(dtype, same) for dtype, same in by_dtype.items()]


def _distance(dtype: str, groups: list[SwitchGroup]) -> str:
    found = [one for group in groups for one in group.others]
    norms = [one.first_grad_norm for one in found if one.first_grad_norm is not None]
    losses = [one.loss for one in found if one.loss is not None]
    switch = groups[0].switch
    others = ", ".join(dict.fromkeys(setting_text(one.cell, switch) for one in found))
    base = setting_text(groups[0].base.cell, switch)
    return (
        f"{_TITLES[switch]} with {dtype} gradients on the wire: {others} against {base}: gradient "
        f"norm of the first step up to {quantity.difference(max(norms, default=None))} apart, "
        f"losses up to {quantity.difference(max(losses, default=None))} (relative)."
    )


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
    return Table.of(
        f"cell | {group.switch} | losses and gradient norms | loss differs by | grad norm, step 1"
        " | grad norm, any step | memory peak of a step",
        [_row(found, group) for found in (group.base, *group.others)],
        left=3,
    )


def _row(found: SwitchDifference, group: SwitchGroup) -> Row:
    is_base = found is group.base
    verdict = "the same bits" if found.exact else "not the same bits"
    broken = not is_base and not found.exact and group.must_agree
    texts = (
        found.cell.name,
        setting_text(found.cell, group.switch),
        "compared with" if is_base else verdict,
        quantity.difference(None if is_base else found.loss),
        quantity.difference(None if is_base else found.first_grad_norm),
        quantity.difference(None if is_base else found.grad_norm),
        quantity.binary_bytes(found.peak_bytes),
    )
    return Row(texts, "bad" if broken else "plain")
