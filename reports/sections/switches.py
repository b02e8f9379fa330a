"""Cells that differ in one switch of the engine only: what it changes in numbers and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench.derive.metrics import CURVES
from bench.record import RunRecord
from bench.spec import POOLS
from reports.compare.series import Gap, stated_steps
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Heading, Paragraph, TableBlock
from reports.renderers.table import Row, Table
from reports.views.cells import Cell
from reports.views.reference import unusual_settings


class Switch(NamedTuple):
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


class SwitchDifference(NamedTuple):
    """A cell against the first of its group; None where it cannot be said.

    setting: value of the switch, `max_pool, 2 slots`. Relative differences are the largest over
    steps and ranks; exact: every loss and gradient norm of every rank has the same bits.
    """

    cell: Cell
    setting: str
    exact: bool
    loss: float | None
    grad_norm: float | None
    first_grad_norm: float | None
    peak_bytes: int | None


class SwitchGroup(NamedTuple):
    """Cells that are equal but for `switch`; `base` has its default, or is nearest to it."""

    switch: Switch
    base: SwitchDifference
    others: tuple[SwitchDifference, ...]


def switch_groups(cells: Sequence[Cell]) -> list[SwitchGroup]:
    """Finished cells that differ in one switch only, group by group, switch by switch."""
    differing = []
    for switch in SWITCHES:
        groups: dict[str, list[Cell]] = {}
        for cell in cells:
            document = json.loads(cell.resolved.canonical_json())
            for setting in switch.settings:
                document["engine"].pop(setting, None)
            if cell.finished:
                groups.setdefault(json.dumps(document, sort_keys=True), []).append(cell)
        for members in groups.values():
            engines = [cell.resolved.engine for cell in members]
            if len({tuple(map(engine.setting, switch.settings)) for engine in engines}) > 1:
                base = min(members, key=unusual_settings)
                others = [cell for cell in members if cell is not base]
                of_base, *rest = (_difference(cell, base, switch) for cell in (base, *others))
                differing.append(SwitchGroup(switch, of_base, tuple(rest)))
    return differing


def _difference(cell: Cell, base: Cell, switch: Switch) -> SwitchDifference:
    head, other = cell.finished[0].record, base.finished[0].record
    losses, norms = (_gaps(head, other, name) for name in CURVES)
    summary, engine = cell.finished[0].summary, cell.resolved.engine
    value = engine.setting(switch.name)
    pooled = switch.name == "allocator" and value in POOLS
    return SwitchDifference(
        cell,
        f"{value}, {engine.setting('pool_slots')} slots" if pooled else str(value),
        bool(losses) and not any(gap.largest for gap in (*losses, *norms)),
        _largest(losses),
        _largest(norms),
        norms[0].sizes[0] if norms else None,
        summary.ledger_peak_bytes if summary.ledger_is_measured else None,
    )


def _gaps(head: RunRecord, base: RunRecord, name: str) -> list[Gap]:
    """Rank by rank, of the ranks and steps that both have."""
    gaps = (
        Gap.of(stated_steps(base.steps[rank], name), stated_steps(head.steps[rank], name))
        for rank in sorted(head.steps.keys() & base.steps.keys())
    )
    return [gap for gap in gaps if gap]


def _largest(gaps: Sequence[Gap]) -> float | None:
    return max((abs(gap.largest) for gap in gaps), default=None)


def switches_section(findings: Findings) -> Iterator[Block]:
    """Nothing where no two cells differ in one switch only."""
    groups = switch_groups(findings.finished)
    for switch in SWITCHES:
        same = [group for group in groups if group.switch == switch]
        if same:
            yield Heading(switch.title)
            yield Paragraph(switch.explanation)
            yield from (TableBlock(_table(group)) for group in same)


def _table(group: SwitchGroup) -> Table:
    rows = []
    for row in (group.base, *group.others):
        is_base = row is group.base
        verdict = "the same bits" if row.exact else "not the same bits"
        moved = (row.loss, row.first_grad_norm, row.grad_norm)
        texts = (
            row.cell.name,
            row.setting,
            "compared with" if is_base else verdict,
            *(quantity.difference(None if is_base else value) for value in moved),
            quantity.binary_bytes(row.peak_bytes),
        )
        broken = not (is_base or row.exact) and group.switch.must_agree
        rows.append(Row(texts, "bad" if broken else "plain"))
    return Table.of(
        f"cell | {group.switch.name} | losses and gradient norms | loss differs by"
        " | grad norm, step 1 | grad norm, any step | memory peak of a step",
        rows,
        left=3,
    )


def switch_sentences(findings: Findings) -> list[str]:
    """For the headline: whether allocators agree to the last bit, by how much reducers differ."""
    groups = switch_groups(findings.finished)
    apart: dict[str, list[SwitchGroup]] = {}
    for group in groups:
        if not group.switch.must_agree:
            apart.setdefault(group.base.cell.resolved.dtypes.grad_comm, []).append(group)
    return [
        *(_agreement(group) for group in groups if group.switch.must_agree),
        *(_distance(dtype, same) for dtype, same in apart.items()),
    ]


def _distance(dtype: str, groups: Sequence[SwitchGroup]) -> str:
    """The largest difference of groups that send gradients in one dtype."""
    first, apart = groups[0], [other for group in groups for other in group.others]
    norm, loss = (
        quantity.difference(max((v for v in values if v is not None), default=None))
        for values in (
            [row.first_grad_norm for row in apart],
            [row.loss for row in apart],
        )
    )
    others = ", ".join(dict.fromkeys(row.setting for row in apart))
    return (
        f"{first.switch.title} with {dtype} gradients on the wire: {others} against "
        f"{first.base.setting}: gradient norm of the first step up to {norm} apart, losses up to "
        f"{loss} (relative)."
    )


def _agreement(group: SwitchGroup) -> str:
    cells = (group.base, *group.others)
    broken = [other.cell.name for other in group.others if not other.exact]
    same = f"the same bits in {quantity.counted(len(cells), 'cell')}"
    if broken:
        same = f"not the same bits in {', '.join(broken)} as in {group.base.cell.name}"
    text = f"{group.switch.title}: losses and gradient norms have {same}"
    peaks = [(row.peak_bytes, row.cell.name) for row in cells if row.peak_bytes is not None]
    if peaks:
        ends = (choose(peaks, key=lambda peak: peak[0]) for choose in (min, max))
        low, high = (f"{quantity.binary_bytes(size)} ({name})" for size, name in ends)
        text += f"; memory peak of a step from {low} to {high}"
    return f"{text}."
