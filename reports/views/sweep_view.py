"""One sweep as a report sees it: what was planned, what ran, what is missing or damaged."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.errors import UsageError
from bench.plan import Plan, PrunedCell
from bench.record import RunRecord
from bench.store import DamagedRun, ResultsStore
from reports.views.cells import Cell, make_cell

_BASE = "base"


Codes = Mapping[tuple[str, str | None], str]
"""Cell and arm -> the code that its runs are to have measured."""


@dataclass(frozen=True)
class SweepView:
    """`cells` in the order of the plan. `problems` are sentences about files that are damaged.

    merged: (cell, cell whose runs count for it too). stale: runs of configurations that the sweep
    no longer plans; they are left out. arms: planned or found, in that order; planned counts each
    cell once per arm.
    """

    id: str
    description: str = ""
    source: str = ""
    planned: int = 0
    arms: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()
    not_run: tuple[str, ...] = ()
    pruned: tuple[PrunedCell, ...] = ()
    merged: tuple[tuple[str, str], ...] = ()
    stale: int = 0
    problems: tuple[str, ...] = ()


def base_arm(arms: Sequence[str]) -> str:
    """What the others are compared with unless somebody says otherwise: `base`, or the first."""
    return _BASE if _BASE in arms else arms[0]


def plan_of(store: ResultsStore, sweep: str) -> Plan:
    """The plan of `sweep`; an empty one of runs that have none.

    Raises:
        UsageError: it cannot be read, or there is neither a plan nor a run.
    """
    if sweep not in store.sweeps() and any(store.statuses(sweep)):
        return no_plan(sweep)
    return Plan.from_document(store.read_plan(sweep))


def no_plan(sweep: str) -> Plan:
    """Of a sweep whose plan is lost."""
    return Plan(id=sweep, name=sweep, description="", source="", cells=())


def load_sweeps(
    store: ResultsStore,
    sweep_ids: Sequence[str],
    codes: Codes | None = None,
) -> list[SweepView]:
    """Read the sweeps. Cell names get the sweep's id in front where there are several sweeps.

    codes: cell and arm -> the code whose runs count, where there are any of it.

    Raises:
        UsageError: one has neither a plan nor a run.
    """
    damaged: list[DamagedRun] = []
    records = list(store.records(damaged=damaged))
    lost = [f"{run.run_id}: {run.problem}" for run in damaged]
    several = len(set(sweep_ids)) > 1
    return [
        _load(store, sweep_id, records, f"{sweep_id}: " if several else "", codes or {}, lost=lost)
        for sweep_id in dict.fromkeys(sweep_ids)
    ]


def load_side(store: ResultsStore, name: str, codes: Codes | None = None) -> list[Cell]:
    """The cells that `name` stands for; of a whole sweep, those of `codes` as in `load_sweeps`.

    Raises:
        UsageError: no sweep, cell or run has this name, or several runs do.
    """
    if name in store.sweeps() or any(store.records(sweep=name)):
        return list(load_sweeps(store, [name], codes)[0].cells)
    sweep, colon, cell_name = name.partition(":")
    if colon and (sweep in store.sweeps() or any(store.records(sweep=sweep))):
        cells = load_sweeps(store, [sweep])[0].cells
        same = [cell for cell in cells if cell.name == cell_name]
        if not same:
            known = ", ".join(cell.name for cell in cells) or "none has run"
            raise UsageError(f"sweep {sweep} has no cell {cell_name!r} that ran; cells: {known}")
        return same
    try:
        record = store.read(name)
    except UsageError as error:
        known = ", ".join(store.sweeps()) or "none"
        raise UsageError(
            f"{name!r} is neither a sweep ({known}) nor SWEEP:CELL nor a run: {error}"
        ) from error
    return [make_cell(record.run_id, [record])]


def _load(
    store: ResultsStore,
    sweep_id: str,
    records: Sequence[RunRecord],
    prefix: str,
    codes: Codes,
    *,
    lost: Sequence[str],
) -> SweepView:
    own = [record for record in records if record.status.sweep == sweep_id]
    problems: list[str] = []
    plan = no_plan(sweep_id)
    try:
        plan = Plan.from_document(store.read_plan(sweep_id))
    except UsageError as error:
        if not own:
            raise
        problems.append(f"the plan of {sweep_id} cannot be read: {error}")
    planned = {cell.id: cell.config_hashes for cell in plan.cells}
    by_cell = _members(own, planned, records)
    arms = _arms(plan.arm_names, own)
    by_cell = _with_arms_in_order(by_cell, arms)
    if len(arms) > 1 and not plan.arms and _BASE not in arms:
        problems.append(
            f"which arm of {sweep_id} is the base is lost with its plan: {arms[0]}, which ran"
            " first, is taken for it, and changes may have the wrong sign; run the sweep again"
        )
    cells = [
        make_cell(
            prefix + cell + (f" [{arm}]" if arm else ""), members, codes.get((cell, arm or None))
        )
        for (cell, arm), members in by_cell.items()
    ]
    shown = {record.run_id for members in by_cell.values() for record in members}
    stale = sum(record.run_id not in shown for record in own)
    problems.extend(lost)
    return SweepView(
        id=sweep_id,
        description=plan.description,
        source=plan.source,
        planned=len(plan.cells) * max(1, len(plan.arms)) or len(by_cell),
        arms=arms,
        cells=tuple(cells),
        not_run=tuple(prefix + name for name in _not_run(planned, plan.arm_names, by_cell)),
        pruned=tuple(replace(cell, id=prefix + cell.id) for cell in plan.pruned),
        merged=tuple((prefix + twin.id, prefix + twin.same_as) for twin in plan.duplicates),
        stale=stale,
        problems=tuple(problems),
    )


def _members(
    own: Sequence[RunRecord],
    planned: Mapping[str, Sequence[str]],
    records: Sequence[RunRecord],
) -> dict[tuple[str, str], list[RunRecord]]:
    """Runs by (cell, arm) in the order of the plan, matched by configuration as resuming does.

    A planned cell without a run of its own takes runs of the same configuration from elsewhere in
    the store: a run whose status is damaged no longer says where it belongs. Without a plan cells
    come in the order of their first run.
    """
    members = [] if planned else [(_name_of(record), record) for record in own]
    named = [(record.resolved.config_hash, record) for record in own]
    elsewhere = [(r.resolved.config_hash, r) for r in records if not r.status.sweep]
    for cell, hashes in planned.items():
        same = [record for name, record in named if name in hashes] or [
            record for name, record in elsewhere if name in hashes
        ]
        if len(hashes) > 1:
            # Arms of two cells may have one run in common: the configuration is not enough.
            same = [r for r in same if r.status.cell == cell] or same
        members += [(cell, record) for record in same]
    by_cell: dict[tuple[str, str], list[RunRecord]] = {}
    for cell, record in members:
        by_cell.setdefault((cell, record.status.arm or ""), []).append(record)
    return by_cell


def _name_of(record: RunRecord) -> str:
    return record.status.cell or f"{record.resolved.slug}-{record.resolved.config_hash}"


def _arms(planned: Sequence[str], own: Sequence[RunRecord]) -> tuple[str, ...]:
    """`base` first, then in the order of the plan, then those that only runs have."""
    ran = [record.status.arm for record in own]
    names = dict.fromkeys(name for name in [*planned, *ran] if name)
    return tuple(sorted(names, key=lambda name: name != _BASE))


def _not_run(
    planned: Iterable[str], arms: Sequence[str], ran: Container[tuple[str, str]]
) -> list[str]:
    """Planned cells without a run; of a cell that lacks some of its arms only, these."""
    names = []
    for cell in planned:
        missing = [arm for arm in arms or ("",) if (cell, arm) not in ran]
        if len(missing) == max(1, len(arms)):
            names.append(cell)
        else:
            names += [f"{cell} [{arm}]" for arm in missing]
    return names


def _with_arms_in_order(
    by_cell: Mapping[tuple[str, str], list[RunRecord]], arms: Sequence[str]
) -> dict[tuple[str, str], list[RunRecord]]:
    """The arms of every cell in their own order, whichever of them happened to run first."""
    place = {arm: index for index, arm in enumerate(arms)}
    cells = {cell: index for index, (cell, _) in enumerate(by_cell)}
    keys = sorted(by_cell, key=lambda key: (cells[key[0]], place.get(key[1], -1)))
    return {key: by_cell[key] for key in keys}
