"""Memory of one step: its timeline, what was alive at the peak, padding per unit, the pools."""

from __future__ import annotations

from bench.derive.timeline import Held, Peak, peak, read_timeline
from bench.record import MemoryTimeline
from bench.spec import ModelShape
from reports.findings import Findings
from reports.plots.categories import in_order
from reports.plots.memory_timeline import MOST_TIMELINES, memory_timeline_figure
from reports.renderers import quantity
from reports.renderers.document import Block, Figure, Heading, Paragraph, Section, TableBlock
from reports.renderers.table import Row, Table, columns
from reports.views.cells import Cell
from reports.views.pool_plan import PoolPlanDocument, alike, read_pool_plan, seated
from reports.views.unit_names import unit_name, unit_names

#: Buffers that come and go with their unit; everything else lasts.
_PASSING = ("compute_weights", "grad_bucket", "outer_bucket", "grad_cast", "peer_slices")
_SHOWN_ROLES = {
    "compute_weights": "weights",
    "grad_bucket": "gradient bucket",
    "outer_bucket": "outer bucket",
    "peer_slices": "slices from peers",
    "grad_cast": "cast gradients",
}
_MOST_LISTED = 6
Drawn = list[tuple[Cell, MemoryTimeline]]
Planned = list[tuple[Cell, PoolPlanDocument]]


def memory_section(findings: Findings) -> Section | None:
    """None where no run has kept a timeline or a plan of its buffers."""
    drawn: Drawn = []
    planned: Planned = []
    for cell in findings.finished:
        memory = cell.finished[0].record.memory
        timeline, plan = read_timeline(memory), read_pool_plan(memory)
        if timeline is not None:
            drawn.append((cell, timeline))
        if plan is not None and plan.units:
            planned.append((cell, plan))
    blocks = [*_timeline_blocks(findings, drawn), *_padding_blocks(planned), *_pool_blocks(planned)]
    return Section("memory", "Memory of one step", tuple(blocks)) if blocks else None


def _timeline_blocks(findings: Findings, drawn: Drawn) -> list[Block]:
    if not drawn:
        return []
    step = drawn[0][1].step
    caption = (
        f"What the engine's own ledger holds during step {step} of the first run, rank 0; panels"
        " share one scale of bytes. Step times of recorded steps do not count."
    )
    if len(drawn) > MOST_TIMELINES:
        caption += f" The first {MOST_TIMELINES} of {len(drawn)} cells are drawn."
    missing = [cell.name for cell in findings.finished if cell not in [c for c, _ in drawn]]
    blocks: list[Block] = [
        Figure(
            "memory-timeline",
            memory_timeline_figure([(cell.name, timeline) for cell, timeline in drawn]),
            caption,
        ),
        TableBlock(
            _peak_table(drawn),
            "Alive at the peak: bytes by category, and the buffers that come and go with their "
            "units, in the order in which they were taken. A slot of a pool is named while a unit "
            "uses it; its bytes are the pool's.",
        ),
    ]
    if missing:
        text = f"No timeline, because the engine keeps no ledger: {', '.join(missing)}."
        blocks.append(Paragraph(text, tone="note"))
    return blocks


def _peak_table(drawn: Drawn) -> Table:
    peaks = [(cell, peak(timeline)) for cell, timeline in drawn]
    categories = in_order(
        name for _, found in peaks for name, size in found.moment.by_category.items() if size
    )
    titles = columns(
        "cell", "alive with their units", "peak", *(c.replace("_", " ") for c in categories), left=2
    )
    rows = [
        Row(
            (
                cell.name,
                _alive(found, cell.resolved.shape),
                quantity.binary_bytes(found.moment.total_bytes),
                *(quantity.binary_bytes(found.moment.by_category.get(c, 0)) for c in categories),
            )
        )
        for cell, found in peaks
    ]
    return Table(titles, tuple(rows))


def _alive(found: Peak, shape: ModelShape | None) -> str:
    by_role: dict[str, list[Held]] = {}
    for held in found.alive:
        if held.role in _PASSING and held.unit:
            by_role.setdefault(held.role, []).append(held)
    texts = []
    for role, buffers in by_role.items():
        names = [
            f"{unit_name(held.unit, shape)} {quantity.binary_bytes(held.bytes)}"
            for held in buffers[:_MOST_LISTED]
        ]
        if len(buffers) > _MOST_LISTED:
            rest = sum(held.bytes for held in buffers[_MOST_LISTED:])
            names.append(
                f"{len(buffers) - _MOST_LISTED} more of {quantity.binary_bytes(rest)} together"
            )
        texts.append(f"{_SHOWN_ROLES.get(role, role)}: {', '.join(names)}")
    return "; ".join(texts) or "nothing"


def _padding_blocks(planned: Planned) -> list[Block]:
    """Cells with equal plans share their rows."""
    if not planned:
        return []
    rows: dict[tuple[str, ...], list[str]] = {}
    for cell, plan in planned:
        for group in alike(plan.units):
            bucket = group.bucket
            texts = (
                unit_names(group.units, cell.resolved.shape),
                _SHOWN_ROLES.get(bucket.role, bucket.role),
                bucket.dtype,
                quantity.binary_bytes(bucket.bytes),
                quantity.binary_bytes(bucket.padding_bytes),
                quantity.share(bucket.padding_bytes / bucket.bytes if bucket.bytes else 0.0, 2),
                bucket.placement.replace("_", " "),
                quantity.binary_bytes(bucket.waste_bytes) if bucket.slot is not None else "-",
            )
            rows.setdefault(texts, []).append(cell.name)
    titles = columns(
        "units",
        "buffer",
        "dtype",
        "placement",
        "cells",
        "bytes",
        "padding",
        "share",
        "waste",
        left=5,
    )
    table = Table(
        titles,
        tuple(
            Row((t[0], t[1], t[2], t[6], _cells(names, len(planned)), t[3], t[4], t[5], t[7]))
            for t, names in rows.items()
        ),
    )
    caption = (
        "Per unit: bytes of each buffer, the part that is padding (rows are not cut and slices are "
        "equal), who provides it, and for pools the part of its area that it leaves unused."
    )
    return [Heading("Padding and pool waste per unit"), TableBlock(table, caption)]


def _cells(names: list[str], planned: int) -> str:
    distinct = list(dict.fromkeys(names))
    return "all" if len(distinct) == planned else ", ".join(distinct)


def _pool_blocks(planned: Planned) -> list[Block]:
    rows: dict[tuple[str, ...], list[str]] = {}
    for cell, plan in planned:
        for pool in plan.pools:
            for number, area in enumerate(pool.areas):
                users = seated(plan, pool, number)
                largest = [b.unit for b in users if b.bytes == area.bytes]
                unused = sum(b.waste_bytes for b in users) / max(1, len(users))
                texts = (
                    _SHOWN_ROLES.get(pool.role, pool.role),
                    f"{number} ({area.dtype})",
                    unit_names(largest, cell.resolved.shape) or quantity.MISSING,
                    str(pool.slots),
                    quantity.binary_bytes(area.bytes),
                    quantity.binary_bytes(area.bytes * pool.slots),
                    str(len(users)),
                    quantity.share(unused / area.bytes if area.bytes else 0.0),
                )
                rows.setdefault(texts, []).append(cell.name)
    if not rows:
        return []
    pooled = sum(bool(plan.pools) for _, plan in planned)
    titles = columns(
        "pool",
        "area",
        "sized by",
        "cells",
        "slots",
        "area bytes",
        "in all slots",
        "units seated",
        "mean waste",
        left=4,
    )
    table = Table(
        titles,
        tuple(Row((*t[:3], _cells(names, pooled), *t[3:])) for t, names in rows.items()),
    )
    caption = (
        "A slot has one area per row; each unit's j-th largest buffer of a dtype sits in the j-th "
        "area of that dtype, which is as large as the largest of them. Mean waste is what a unit "
        "leaves unused of its area, on average over the units seated in it."
    )
    return [Heading("Pool plan"), TableBlock(table, caption)]
