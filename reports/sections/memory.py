"""Memory of one step: timeline, peak, live storage, padding per unit, pools.

Units are named as a reader knows them: by their kind of block, many of them in few words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bench.derive.live_storage import LiveStorage, live_storage
from bench.derive.timeline import MemoryPeak, peak, read_timeline
from bench.record import MemoryChange
from bench.spec import BLOCK_LETTERS, ModelShape
from reports.findings import Findings
from reports.plots.memory import MOST_TIMELINES, memory_timeline_figure
from reports.plots.style import in_order
from reports.renderers import quantity
from reports.renderers.document import Block, Figure, Heading, TableBlock, note
from reports.renderers.quantity import binary_bytes
from reports.renderers.table import Table
from reports.views.cells import Cell
from reports.views.pool_plan import PoolPlanDocument, alike, read_pool_plan, seated

_ROLES = {
    "compute_weights": "weights",
    "payload": "encoded weights",
    "grad_bucket": "gradient bucket",
    "outer_bucket": "outer bucket",
    "peer_slices": "slices from peers",
    "grad_cast": "cast gradients",
}
"""Buffers that come and go with their unit, as a reader calls them; everything else lasts."""
_MOST_LISTED = 6
_MOST_MAKERS = 3
_PEAK = (
    "Alive at the peak: bytes by category, and the buffers that come and go with their "
    "units, in the order in which they were taken. A slot of a pool is named while a unit "
    "uses it; its bytes are the pool's."
)
_PADDING = (
    "Per unit: bytes of each buffer, the part that is padding (rows are not cut and slices are "
    "equal), who provides it, and for pools the part of its area that it leaves unused."
)
_POOLS = (
    "A slot has one area per row; each unit's j-th largest buffer of a role and dtype sits in the "
    "j-th such area, as large as the largest in it. Mean waste: what its units leave unused of it."
)
_Rows = Iterator[tuple[str, ...]]


def memory_section(findings: Findings) -> Iterator[Block]:
    """Nothing where no run has kept a timeline, its live storage or a plan of its buffers."""
    kept = [(cell, cell.finished[0].record) for cell in findings.finished]
    drawn = [(cell, line) for cell, record in kept if (line := read_timeline(record.memory))]
    if drawn:
        caption = (
            f"What the engine's own ledger holds during step {drawn[0][1].step} of the first run, "
            "rank 0; panels share one scale of bytes. Step times of recorded steps do not count."
        )
        caption += quantity.first_of(MOST_TIMELINES, len(drawn))
        figure = memory_timeline_figure([(cell.name, timeline) for cell, timeline in drawn])
        yield Figure("memory-timeline", figure, caption)
        yield TableBlock(_peak_table([(cell, peak(timeline)) for cell, timeline in drawn]), _PEAK)
        if gathering := [cell.name for cell, _ in drawn if cell.resolved.gathers_matrices]:
            names = ", ".join(gathering)
            yield note(f"Without the whole matrices on which the optimizer steps: {names}.")
        with_one = {cell.name for cell, _ in drawn}
        missing = [cell.name for cell, _ in kept if cell.name not in with_one]
        if missing:
            yield note(f"No timeline, because the engine keeps no ledger: {', '.join(missing)}.")
    if live := [(cell, held) for cell, record in kept if (held := live_storage(record))]:
        yield Heading("Live storage")
        makers = ((c.name, _makers(s), binary_bytes(s.bytes_per_rank)) for c, s in live)
        yield TableBlock(
            Table.of("cell | largest, by who made it | live", makers, left=2),
            f"Every tensor storage that was alive behind step {live[0][1].step}, counted once, "
            "whoever holds it; mean over ranks.",
        )
    plans = {cell.name: (cell, read_pool_plan(record.memory)) for cell, record in kept}
    planned = {name: (cell, plan) for name, (cell, plan) in plans.items() if plan and plan.units}
    if planned:
        rows = {name: _padding_rows(*cell_and_plan) for name, cell_and_plan in planned.items()}
        titles = "units | buffer | dtype | placement | cells | bytes | padding | share | waste"
        yield Heading("Padding and pool waste per unit")
        yield TableBlock(Table.of(titles, _of_equal_cells(rows, 4), left=5), _PADDING)
    if pooled := {name: (cell, plan) for name, (cell, plan) in planned.items() if plan.pools}:
        rows = {name: _pool_rows(*cell_and_plan) for name, cell_and_plan in pooled.items()}
        titles = (
            "pool | area | sized by | cells | slots | area bytes | in all slots | units seated"
            " | mean waste"
        )
        table = Table.of(titles, _of_equal_cells(rows, 3), left=4)
        if table.rows:
            yield Heading("Pool plan")
            yield TableBlock(table, _POOLS)


def _peak_table(peaks: Sequence[tuple[Cell, MemoryPeak]]) -> Table:
    categories = in_order(
        name for _, highest in peaks for name, size in highest.moment.by_category.items() if size
    )
    titles = ("cell", "gathered at once", "peak", *(c.replace("_", " ") for c in categories))
    rows = (
        (
            cell.name,
            "; ".join(_gathered(highest, cell.resolved.shape)) or "nothing",
            binary_bytes(highest.moment.total_bytes),
            *(binary_bytes(highest.moment.by_category.get(c, 0)) for c in categories),
        )
        for cell, highest in peaks
    )
    return Table.of(titles, rows, left=2)


def _gathered(at_peak: MemoryPeak, shape: ModelShape | None) -> Iterator[str]:
    """What comes and goes with its unit and was alive, by role."""
    by_role: dict[str, list[MemoryChange]] = {}
    for held in at_peak.alive:
        if held.role in _ROLES and held.unit:
            by_role.setdefault(held.role, []).append(held)
    for role, buffers in by_role.items():
        shown, rest = buffers[:_MOST_LISTED], buffers[_MOST_LISTED:]
        names = [f"{unit_name(held.unit, shape)} {binary_bytes(held.bytes)}" for held in shown]
        if rest:
            together = binary_bytes(sum(held.bytes for held in rest))
            names.append(f"{len(rest)} more of {together} together")
        yield f"{_ROLES[role]}: {', '.join(names)}"


def _makers(live: LiveStorage) -> str:
    return ", ".join(
        f"{row.site or 'outside of operations'} {binary_bytes(row.bytes / len(live.bytes))}"
        for row in live.rows[:_MOST_MAKERS]
    )


def _of_equal_cells(rows: Mapping[str, _Rows], place: int) -> _Rows:
    """Each row once, with the names of the cells that have it as its column number `place`."""
    names: dict[tuple[str, ...], dict[str, None]] = {}
    for cell, texts in ((cell, texts) for cell, of_cell in rows.items() for texts in of_cell):
        names.setdefault(texts, {})[cell] = None
    for texts, cells in names.items():
        which = "all" if len(cells) == len(rows) else ", ".join(cells)
        yield (*texts[:place], which, *texts[place:])


def _padding_rows(cell: Cell, plan: PoolPlanDocument) -> _Rows:
    for same in alike(plan.units):
        bucket = same[0]
        yield (
            unit_names((member.unit for member in same), cell.resolved.shape),
            _ROLES.get(bucket.role, bucket.role),
            bucket.dtype,
            bucket.placement.replace("_", " "),
            binary_bytes(bucket.bytes),
            binary_bytes(bucket.padding_bytes),
            quantity.share(bucket.padding_bytes / bucket.bytes if bucket.bytes else 0.0, 2),
            binary_bytes(bucket.waste_bytes if bucket.slot is not None else None),
        )


def _pool_rows(cell: Cell, plan: PoolPlanDocument) -> _Rows:
    for pool in plan.pools:
        for number, area in enumerate(pool.areas):
            users = seated(plan, pool, number)
            largest = [bucket.unit for bucket in users if bucket.bytes == area.bytes]
            unused = sum(bucket.waste_bytes for bucket in users) / max(1, len(users))
            yield (
                _ROLES.get(area.role, area.role),
                f"{number} ({area.dtype})",
                unit_names(largest, cell.resolved.shape) or quantity.MISSING,
                str(pool.slots),
                binary_bytes(area.bytes),
                binary_bytes(area.bytes * pool.slots),
                str(len(users)),
                quantity.share(unused / area.bytes if area.bytes else 0.0),
            )


_NUMBERED = re.compile(r"(?P<stem>.*\.)(?P<number>\d+)")
_MOST_NAMED = 6


def unit_name(unit: str, shape: ModelShape | None) -> str:
    """`layers.3 (attention)` in a hybrid, else the name itself; the root is `root`."""
    return "root" if unit in ("", "(root)") else unit + _kind(unit, shape)


def unit_names(units: Iterable[str], shape: ModelShape | None) -> str:
    """Several of one kind: `layers.0, 2, 5, 7 (Mamba-2)`."""
    distinct = list(dict.fromkeys(units))
    numbered = [match for unit in distinct if (match := _NUMBERED.fullmatch(unit))]
    alike_in = {(match["stem"], _kind(match[0], shape)) for match in numbered}
    if len(distinct) == 1 or len(numbered) != len(distinct) or len(alike_in) != 1:
        return ", ".join(unit_name(unit, shape) for unit in distinct)
    numbers = [match["number"] for match in numbered]
    if len(numbers) > _MOST_NAMED:
        numbers = [*numbers[: _MOST_NAMED - 1], f"... {numbers[-1]}: {len(numbers)} units"]
    ((stem, kind),) = alike_in
    return f"{stem}{', '.join(numbers)}{kind}"


def _kind(unit: str, shape: ModelShape | None) -> str:
    """` (attention)`, of a block of a hybrid; else ""."""
    match = _NUMBERED.fullmatch(unit)
    if shape is None or shape.hybrid is None or match is None or match["stem"] != "layers.":
        return ""
    letter = shape.hybrid.pattern[int(match["number"]) :][:1]
    return f" ({BLOCK_LETTERS[letter]})" if letter in BLOCK_LETTERS else ""
