"""Cells that differ in one switch of the engine only: what it changes in numbers and memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from bench.record import RunRecord
from bench.spec import POOLS
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Heading, Paragraph, Section, TableBlock
from reports.renderers.table import Row, Table
from reports.views.cells import Cell
from reports.views.reference import unusual_settings


@dataclass(frozen=True)
class Switch:
    """settings: what makes it up, the one that is shown first.

    must_agree: whether it may not change a single bit of any loss.
    """

    title: str
    settings: tuple[str, ...]
    explanation: str
    must_agree: bool = True

    @property
    def name(self) -> str:
        """The setting that is shown."""
        return self.settings[0]


SWITCHES = (
    Switch(
        "Allocators",
        ("allocator", "double_buffer", "pool_slots"),
        "An allocator decides where buffers lie and when their memory is free, never what is in "
        "them: losses and gradient norms must have the same bits in every cell.",
    ),
    Switch(
        "Reducers",
        ("transport",),
        "point_to_point sends gradients in their communication dtype and adds them up locally in "
        "FP32, in the order of ranks; native leaves order and rounding of the sum to the backend. "
        "The gradient norm of the first step, where both have the same weights, shows the rounding "
        "of one reduction; later steps show what training makes of it. Runs do not record the "
        "exact sum: that point_to_point is the FP32 sum of the BF16 contributions, bit by bit, on "
        "2 and 4 ranks, is what tests/core/test_oracle_dtypes.py checks.",
        must_agree=False,
    ),
    Switch(
        "Gathering by module",
        ("fine_grained_gather",),
        "Gathering by module or by unit decides when weights arrive, never what is in them: losses "
        "and gradient norms must have the same bits in every cell.",
    ),
    Switch(
        "Gathers of quantised weights",
        ("gather_precision",),
        "Weights gathered as codes of their recipe, or in the compute dtype and quantised on "
        "arrival with the same scales, are the same weights: losses and gradient norms must have "
        "the same bits in every cell. What differs is what travels.",
    ),
)
"""In the order in which a report shows them."""


@dataclass(frozen=True)
class SwitchDifference:
    """A cell against the first of its group; None where it cannot be said.

    Relative differences are the largest over steps and ranks; exact: every loss and gradient norm
    of every rank has the same bits.
    """

    cell: Cell
    exact: bool
    loss: float | None
    grad_norm: float | None
    first_grad_norm: float | None
    peak_bytes: int | None


@dataclass(frozen=True)
class SwitchGroup:
    """Cells that are equal but for `switch`; `base` has its default, or is nearest to it."""

    switch: Switch
    base: SwitchDifference
    others: tuple[SwitchDifference, ...]


def switch_groups(cells: Sequence[Cell]) -> list[SwitchGroup]:
    """Finished cells that differ in one switch only, group by group, switch by switch."""
    groups_by_switch = []
    for switch in SWITCHES:
        groups: dict[str, list[Cell]] = {}
        for cell in cells:
            if cell.finished:
                groups.setdefault(_without(cell, switch), []).append(cell)
        for members in groups.values():
            values = {
                tuple(cell.resolved.engine.setting(name) for name in switch.settings)
                for cell in members
            }
            if len(values) > 1:
                base = min(members, key=unusual_settings)
                others = (_difference(cell, base) for cell in members if cell is not base)
                groups_by_switch.append(SwitchGroup(switch, _difference(base, base), tuple(others)))
    return groups_by_switch


def _without(cell: Cell, switch: Switch) -> str:
    document = json.loads(cell.resolved.canonical_json())
    for setting in switch.settings:
        document["engine"].pop(setting, None)
    return json.dumps(document, sort_keys=True)


def _difference(cell: Cell, base: Cell) -> SwitchDifference:
    one, other = cell.finished[0].record, base.finished[0].record
    losses = _pairs(one, other, "loss")
    norms = _pairs(one, other, "grad_norm")
    summary = cell.finished[0].summary
    return SwitchDifference(
        cell=cell,
        exact=bool(losses) and all(a == b for a, b in (*losses, *norms)),
        loss=_largest(losses),
        grad_norm=_largest(norms),
        first_grad_norm=_largest(norms[:1]),
        peak_bytes=summary.ledger_peak_bytes if summary.ledger_is_measured else None,
    )


def _pairs(one: RunRecord, other: RunRecord, field: str) -> list[tuple[float, float]]:
    """Values of both runs, step by step and rank by rank; only steps that both have."""
    pairs = []
    for rank in sorted(one.steps.keys() & other.steps.keys()):
        for a, b in zip(one.steps[rank], other.steps[rank], strict=False):
            first, second = getattr(a, field), getattr(b, field)
            if first is not None and second is not None:
                pairs.append((float(first), float(second)))
    return pairs


def _largest(pairs: Sequence[tuple[float, float]]) -> float | None:
    if not pairs:
        return None
    return max(abs(a - b) / abs(b) if b else abs(a - b) for a, b in pairs)


def _setting(cell: Cell, switch: Switch) -> str:
    """The value of a switch in a cell: `max_pool, 2 slots`."""
    engine = cell.resolved.engine
    value = engine.setting(switch.name)
    pooled = switch.name == "allocator" and value in POOLS
    return f"{value}, {engine.setting('pool_slots')} slots" if pooled else str(value)


def switches_section(findings: Findings) -> Section | None:
    """None where no two cells differ in one switch only."""
    groups = switch_groups(findings.finished)
    if not groups:
        return None
    blocks: list[Block] = []
    for switch in SWITCHES:
        same = [group for group in groups if group.switch == switch]
        if same:
            blocks += [Heading(switch.title), Paragraph(switch.explanation)]
            blocks += [TableBlock(_table(group)) for group in same]
    return Section("switches", "One switch at a time", tuple(blocks))


def switch_sentences(findings: Findings) -> list[str]:
    """For the headline: whether allocators agree to the last bit, by how much reducers differ."""
    groups = switch_groups(findings.finished)
    sentences = [_agreement(group) for group in groups if group.switch.must_agree]
    return sentences + _distances([group for group in groups if not group.switch.must_agree])


def _distances(groups: Sequence[SwitchGroup]) -> list[str]:
    """One sentence per gradient communication dtype, the largest difference of its groups."""
    by_dtype: dict[str, list[SwitchGroup]] = {}
    for group in groups:
        by_dtype.setdefault(group.base.cell.resolved.dtypes.grad_comm, []).append(group)
    sentences = []
    for dtype, same in by_dtype.items():
        apart, switch = [other for group in same for other in group.others], same[0].switch
        norms = [cell.first_grad_norm for cell in apart if cell.first_grad_norm is not None]
        losses = [cell.loss for cell in apart if cell.loss is not None]
        others = ", ".join(dict.fromkeys(_setting(cell.cell, switch) for cell in apart))
        sentences.append(
            f"{switch.title} with {dtype} gradients on the wire: {others} against "
            f"{_setting(same[0].base.cell, switch)}: gradient norm of the first step up to "
            f"{quantity.difference(max(norms, default=None))} apart, "
            f"losses up to {quantity.difference(max(losses, default=None))} (relative)."
        )
    return sentences


def _agreement(group: SwitchGroup) -> str:
    cells = (group.base, *group.others)
    broken = [other.cell.name for other in group.others if not other.exact]
    same = (
        f"not the same bits in {', '.join(broken)} as in {group.base.cell.name}"
        if broken
        else f"the same bits in {quantity.counted(len(cells), 'cell')}"
    )
    text = f"{group.switch.title}: losses and gradient norms have {same}"
    peaks = [cell for cell in cells if cell.peak_bytes is not None]
    if not peaks:
        return f"{text}."
    low, high = (choose(peaks, key=lambda cell: cell.peak_bytes or 0) for choose in (min, max))
    return (
        f"{text}; memory peak of a step from {quantity.binary_bytes(low.peak_bytes)} "
        f"({low.cell.name}) to {quantity.binary_bytes(high.peak_bytes)} ({high.cell.name})."
    )


def _table(group: SwitchGroup) -> Table:
    return Table.of(
        f"cell | {group.switch.name} | losses and gradient norms | loss differs by"
        " | grad norm, step 1 | grad norm, any step | memory peak of a step",
        [_row(one, group) for one in (group.base, *group.others)],
        left=3,
    )


def _row(difference: SwitchDifference, group: SwitchGroup) -> Row:
    is_base = difference is group.base
    verdict = "the same bits" if difference.exact else "not the same bits"
    broken = not is_base and not difference.exact and group.switch.must_agree
    texts = (
        difference.cell.name,
        _setting(difference.cell, group.switch),
        "compared with" if is_base else verdict,
        quantity.difference(None if is_base else difference.loss),
        quantity.difference(None if is_base else difference.first_grad_norm),
        quantity.difference(None if is_base else difference.grad_norm),
        quantity.binary_bytes(difference.peak_bytes),
    )
    return Row(texts, "bad" if broken else "plain")
