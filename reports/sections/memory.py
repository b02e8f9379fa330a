"""Memory of one step: timeline, peak, live storage, padding per unit, pools.

Units are named as a reader knows them: by their kind of block, many of them in few words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from bench.derive.live_storage import LiveRow, LiveStorage, live_storage
from bench.derive.timeline import MemoryPeak, peak, read_timeline
from bench.record import MemoryChange, MemoryTimeline
from bench.spec import BLOCK_LETTERS, ModelShape
from reports.findings import Findings
from reports.plots.memory_timeline import MOST_TIMELINES, memory_timeline_figure
from reports.plots.style import in_order
from reports.renderers import quantity
from reports.renderers.document import Block, Figure, Heading, Paragraph, Section, TableBlock
from reports.renderers.table import Table
from reports.views.cells import Cell
from reports.views.pool_plan import PoolPlanDocument, alike, read_pool_plan, seated

#: Buffers that come and go with their unit; everything else lasts.
_TRANSIENT = ("compute_weights", "grad_bucket", "outer_bucket", "grad_cast", "peer_slices")
_SHOWN_ROLES = {
    "compute_weights": "weights",
    "grad_bucket": "gradient bucket",
    "outer_bucket": "outer bucket",
    "peer_slices": "slices from peers",
    "grad_cast": "cast gradients",
}
_MOST_LISTED = 6
_MOST_MAKERS = 3
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
    blocks = [
        *_timeline_blocks(findings, drawn),
        *_live_blocks(findings),
        *_padding_blocks(planned),
        *_pool_blocks(planned),
    ]
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
    titles = ("cell", "gathered at once", "peak", *(c.replace("_", " ") for c in categories))
    rows = (
        (
            cell.name,
            _alive(found, cell.resolved.shape),
            quantity.binary_bytes(found.moment.total_bytes),
            *(quantity.binary_bytes(found.moment.by_category.get(c, 0)) for c in categories),
        )
        for cell, found in peaks
    )
    return Table.of(titles, rows, left=2)


def _alive(found: MemoryPeak, shape: ModelShape | None) -> str:
    by_role: dict[str, list[MemoryChange]] = {}
    for held in found.alive:
        if held.role in _TRANSIENT and held.unit:
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


def _live_blocks(findings: Findings) -> list[Block]:
    """What ranks held between two steps, whoever held it."""
    read = [(cell, live_storage(cell.finished[0].record)) for cell in findings.finished]
    known = [(cell, live) for cell, live in read if live is not None]
    if not known:
        return []
    rows = (
        (c.name, _makers(live), quantity.binary_bytes(live.bytes_per_rank)) for c, live in known
    )
    table = Table.of("cell | largest, by who made it | live", rows, left=2)
    caption = (
        f"Every tensor storage that was alive behind step {known[0][1].step}, counted once, whoever"
        " holds it; mean over ranks."
    )
    return [Heading("Live storage"), TableBlock(table, caption)]


def _makers(live: LiveStorage) -> str:
    def text(row: LiveRow) -> str:
        size = quantity.binary_bytes(row.bytes / len(live.bytes))
        return f"{row.site or 'outside of operations'} {size}"

    return ", ".join(text(row) for row in live.rows[:_MOST_MAKERS])


def _padding_blocks(planned: Planned) -> list[Block]:
    """Cells with equal plans share their rows."""
    if not planned:
        return []
    rows: dict[tuple[str, ...], list[str]] = {}
    for cell, plan in planned:
        for same in alike(plan.units):
            bucket = same[0]
            texts = (
                unit_names((one.unit for one in same), cell.resolved.shape),
                _SHOWN_ROLES.get(bucket.role, bucket.role),
                bucket.dtype,
                bucket.placement.replace("_", " "),
                quantity.binary_bytes(bucket.bytes),
                quantity.binary_bytes(bucket.padding_bytes),
                quantity.share(bucket.padding_bytes / bucket.bytes if bucket.bytes else 0.0, 2),
                quantity.binary_bytes(bucket.waste_bytes) if bucket.slot is not None else "-",
            )
            rows.setdefault(texts, []).append(cell.name)
    table = Table.of(
        "units | buffer | dtype | placement | cells | bytes | padding | share | waste",
        ((*t[:4], _cells(names, len(planned)), *t[4:]) for t, names in rows.items()),
        left=5,
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
    table = Table.of(
        "pool | area | sized by | cells | slots | area bytes | in all slots | units seated"
        " | mean waste",
        ((*t[:3], _cells(names, pooled), *t[3:]) for t, names in rows.items()),
        left=4,
    )
    caption = (
        "A slot has one area per row; each unit's j-th largest buffer of a dtype sits in the j-th "
        "area of that dtype, which is as large as the largest of them. Mean waste is what a unit "
        "leaves unused of its area, on average over the units seated in it."
    )
    return [Heading("Pool plan"), TableBlock(table, caption)]


_NUMBERED = re.compile(r"(?P<stem>.*\.)(?P<number>\d+)")
_MOST_NAMED = 6
ROOT = "root"


def unit_name(unit: str, shape: ModelShape | None) -> str:
    """`layers.3 (attention)` in a hybrid, else the name itself; the root is `root`."""
    if unit in ("", "(root)"):
        return ROOT
    kind = _kind(unit, shape)
    return unit if kind is None else f"{unit} ({kind})"


def unit_names(units: Iterable[str], shape: ModelShape | None) -> str:
    """Several of one kind: `layers.0, 2, 5, 7 (Mamba-2)`."""
    distinct = list(dict.fromkeys(units))
    numbered = [_NUMBERED.fullmatch(unit) for unit in distinct]
    stems = {match["stem"] for match in numbered if match}
    kinds = {_kind(unit, shape) for unit in distinct}
    if len(distinct) == 1 or len(stems) != 1 or not all(numbered) or len(kinds) != 1:
        return ", ".join(unit_name(unit, shape) for unit in distinct)
    numbers = [match["number"] for match in numbered if match]
    if len(numbers) > _MOST_NAMED:
        numbers = [*numbers[: _MOST_NAMED - 1], f"... {numbers[-1]}: {len(numbers)} units"]
    (kind,) = kinds
    return f"{stems.pop()}{', '.join(numbers)}" + ("" if kind is None else f" ({kind})")


def _kind(unit: str, shape: ModelShape | None) -> str | None:
    match = _NUMBERED.fullmatch(unit)
    if shape is None or shape.hybrid is None or match is None or match["stem"] != "layers.":
        return None
    place = int(match["number"])
    pattern = shape.hybrid.pattern
    return BLOCK_LETTERS.get(pattern[place]) if place < len(pattern) else None
