"""Which numbers a gate compares: two arms of one sweep, or two sides made at different times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from bench.derive.blocks import Block, complete_blocks, is_interleaved
from bench.derive.hardware import STATED
from bench.derive.metrics import Metric
from bench.errors import NotComparableError, UsageError
from bench.plan import PrunedCell
from bench.record import RunRecord, code_with_inputs
from bench.store import ResultsStore
from reports.compare.samples import CellSamples, cell_samples, imported_samples
from reports.compare.unlike import Unlike, is_of_dtypes, text_of, unlike
from reports.views import no_number
from reports.views.cells import Cell, Run
from reports.views.no_number import NOT_RUN
from reports.views.sweep_view import Codes, load_side, load_sweeps, plan_of


@dataclass(frozen=True)
class Pair:
    """One cell on both sides. paired: its runs were made in blocks, in an order that was drawn.

    unlike: in what the sides may not be compared, beside the hardware.
    """

    label: str
    base: CellSamples
    head: CellSamples
    paired: bool
    unlike: tuple[Unlike, ...] = ()

    def of(self, metric: Metric) -> tuple[list[float], list[float]]:
        """The metric's numbers of base and of head; of a pair in blocks, those of every block."""
        base, head = self.base.of(metric), self.head.of(metric)
        if not self.paired:
            return [*base.values()], [*head.values()]
        blocks = sorted(base.keys() & head.keys())
        return [base[block] for block in blocks], [head[block] for block in blocks]


@dataclass(frozen=True)
class Sides:
    """What there is to compare, and what there is not.

    failed: (cell, why) of cells that were planned and gave no number. not_comparable: (cell, why).
    pruned: (cell, reason). source: the sweep file, if known. set_aside: settings in which the sides
    differ and that were left out when matching. differences: of a single pair, with both values.
    """

    base: str
    head: str
    pairs: tuple[Pair, ...]
    failed: tuple[tuple[str, str], ...] = ()
    not_comparable: tuple[tuple[str, str], ...] = ()
    pruned: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    source: str = ""
    set_aside: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    def selected(self, patterns: Sequence[str]) -> Sides:
        """Only the cells that one of `patterns` means.

        Raises:
            UsageError: one of them means none.
        """
        others = (self.failed, self.not_comparable, self.pruned)
        names = [pair.label for pair in self.pairs]
        names += [name for several in others for name, _ in several]
        kept = matching(names, patterns)
        failed, refused, pruned = (
            tuple(one for one in several if one[0] in kept) for several in others
        )
        return replace(
            self,
            pairs=tuple(pair for pair in self.pairs if pair.label in kept),
            failed=failed,
            not_comparable=refused,
            pruned=pruned,
        )


def matching(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """The cells that one of `patterns` means, as `zero3` or `fsdp2-*`; a pair by either of its two.

    Raises:
        UsageError: one of them means none.
    """
    found: set[str] = set()
    for pattern in patterns:
        own = {
            name
            for name in names
            if any(part == pattern or fnmatchcase(part, pattern) for part in name.split(" -> "))
        }
        if not own:
            known = ", ".join(dict.fromkeys(names)) or "none"
            raise UsageError(f"--only {pattern}: no such cell; expected {known}, or a pattern")
        found |= own
    return found


def sides_of_arms(
    store: ResultsStore,
    sweep: str,
    base: str | None = None,
    head: str | None = None,
    codes: Codes | None = None,
) -> Sides:
    """The two arms of a sweep, cell by cell, in complete blocks only.

    A cell with a block that a failed run cost, and that was not repeated since, has failed too.

    Args:
        store: the results folder.
        sweep: id of a sweep that was run with arms.
        base: name of the reference arm; None takes `base`, or the first one.
        head: name of the arm to judge; None takes `head`, or the second one.
        codes: code of the runs that count; None is what the plan was last made for.

    Raises:
        UsageError: an unknown sweep or arm, or a sweep without arms.
    """
    plan = plan_of(store, sweep)
    before, after = arms_of_sweep(store, sweep, base, head)
    wanted = plan.codes if codes is None else codes
    records = [one for one in store.records(sweep=sweep) if one.status.arm and _is_of(wanted, one)]
    blocks = complete_blocks(records, [before, after])
    names = list(dict.fromkeys([*(cell.id for cell in plan.cells), *blocks]))
    pairs, failed, notes = [], [], []
    for name in names:
        members = [r for r in records if r.status.cell == name]
        if blocks.get(name):
            pairs.append(pair_of_arms(name, blocks[name], before, after))
            lost = len({r.status.repeat for r in members}) - len(blocks[name])
            if lost:
                notes.append(f"{name}: {lost} of its blocks are not complete and are left out")
            there = {(one.status.repeat, one.status.arm) for one in members}
            why = no_number.lost_to_a_failure(members, blocks[name][-1])
            why = why or no_number.not_run(plan, name, there, (before, after))
            failed += [(name, why)] if why else []
        else:
            failed.append((name, no_number.why_no_block(members, before, after)))
    return Sides(
        base=f"{sweep} [{before}]",
        head=f"{sweep} [{after}]",
        pairs=tuple(pairs),
        failed=tuple(failed),
        pruned=_pruned(plan.pruned),
        notes=tuple(notes),
        source=plan.source,
    )


def cells_of(
    store: ResultsStore, name: str, arm: str | None = None, codes: Codes | None = None
) -> list[Cell]:
    """The cells that `name` stands for; of a sweep with arms those of one arm.

    codes: of the runs that count, where there are any; else the newest code of each cell counts.

    Raises:
        UsageError: a name that is nothing, or arms and none of them chosen.
    """
    cells = load_side(store, name, codes)
    arms = list(dict.fromkeys(cell.runs[0].record.status.arm for cell in cells))
    if arm is None and len(arms) <= 1:  # no arms, or a single cell of one
        return cells
    if arm not in arms:
        known = ", ".join(str(one) for one in arms)
        asked = "found none of them" if arm is None else f"found {arm!r}"
        raise UsageError(f"{name} was run with the arms {known}; name one of them, {asked}")
    suffix = f" [{arm}]"
    chosen = [cell for cell in cells if cell.runs[0].record.status.arm == arm]
    return [replace(cell, name=cell.name.removesuffix(suffix)) for cell in chosen]


def samples_of(
    store: ResultsStore, name: str, arm: str | None = None, codes: Codes | None = None
) -> list[CellSamples]:
    """As `cells_of`, of those that finished."""
    return [cell_samples(cell) for cell in cells_of(store, name, arm, codes) if cell.finished]


def sides_of_sweeps(
    store: ResultsStore,
    base: str,
    head: str,
    ignore: Sequence[str] = (),
    arms: tuple[str | None, str | None] = (None, None),
    *,
    codes: Codes | None = None,
) -> Sides:
    """Two sweeps, cells or runs made one after the other: never paired.

    Args:
        store: the results folder.
        base: as `reports.views.sweep_view.load_side` understands it.
        head: the same.
        ignore: settings to set aside when cells are matched.
        arms: which arm of base and of head, where they have arms.
        codes: as for `cells_of`, of head.

    Raises:
        UsageError: a name that is nothing, or arms and none of them chosen.
    """
    if {base, head} & {*store.imports.ids()}:
        return _sides_with_imports(store, base, head, arms)
    before, after = cells_of(store, base, arms[0]), cells_of(store, head, arms[1], codes)
    matching = match(before, after, ignore)
    found = [_sweep_pair(*pair, wanted=bool(ignore)) for pair in matching.pairs]
    refused = [
        (cell.name, "no cell of equal configuration in base") for cell in matching.unmatched_head
    ]
    refused += [
        (cell.name, "no cell of equal configuration in head") for cell in matching.unmatched_base
    ]
    pairs = tuple(item for item in found if isinstance(item, Pair))
    failed = tuple(item for item in found if not isinstance(item, Pair))
    failed += tuple(
        (cell.name, why) for cell in after if cell.finished and (why := no_number.lost_repeat(cell))
    )
    single = matching.pairs[0] if len(matching.pairs) == 1 else None
    sides = Sides(
        base,
        head,
        pairs,
        failed,
        not_comparable=tuple(refused),
        set_aside=matching.set_aside,
        differences=() if single is None else tuple(differing_settings(*single)),
    )
    return _with_plan_of_head(store, sides)


def sides_of_baseline(
    store: ResultsStore,
    name: str,
    kept: Sequence[CellSamples],
    head: str,
    arm: str | None = None,
    *,
    codes: Codes | None = None,
) -> Sides:
    """A sweep against the cells of a baseline, matched by configuration.

    codes: as for `cells_of`.

    Raises:
        UsageError: `head` is nothing.
    """
    stated = [cell for cell in kept if cell.hardware.kind == STATED]
    if head in store.imports.ids():
        return stated_sides(f"baseline {name}", kept, head, [_imported(store, head)])
    if stated:
        ours = samples_of(store, head, arm, codes)
        return _with_plan_of_head(store, stated_sides(f"baseline {name}", kept, head, ours))
    by_config = {cell.config_hash: cell for cell in kept}
    pairs, failed, refused = [], [], []
    for cell in cells_of(store, head, arm, codes):
        base = by_config.pop(cell.resolved.config_hash, None)
        if not cell.finished:
            failed.append((cell.name, f"no finished run ({no_number.why_not_finished(cell)})"))
        elif base is None:
            refused.append((cell.name, _no_such_config(cell, kept)))
        else:
            pairs.append(Pair(cell.name, base, cell_samples(cell), paired=False))
            why = no_number.lost_repeat(cell)
            failed += [(cell.name, why)] if why else []
    refused += [(c.name, f"only in baseline {name}") for c in by_config.values()]
    base_name = f"baseline {name}"
    sides = Sides(base_name, head, tuple(pairs), tuple(failed), not_comparable=tuple(refused))
    return _with_plan_of_head(store, sides)


def _imported(store: ResultsStore, name: str) -> CellSamples:
    return imported_samples(store.imports.read(name))


def _sides_with_imports(
    store: ResultsStore, base: str, head: str, arms: tuple[str | None, str | None]
) -> Sides:
    both = [
        [_imported(store, name)] if name in store.imports.ids() else samples_of(store, name, arm)
        for name, arm in ((base, arms[0]), (head, arms[1]))
    ]
    return stated_sides(base, both[0], head, both[1])


def stated_sides(
    base: str, before: Sequence[CellSamples], head: str, after: Sequence[CellSamples]
) -> Sides:
    """A cell of either side is known by what somebody states, so a lone one is for a lone one.

    Otherwise names must agree.
    """
    lone = len(before) == len(after) == 1
    named = {cell.name: cell for cell in before}
    pairs, refused = [], []
    for cell in after:
        other = before[0] if lone else named.get(cell.name)
        if other is None:
            refused.append((cell.name, f"{base} has no cell of this name: {', '.join(named)}"))
        else:
            label = cell.name if cell.name == other.name else f"{other.name} -> {cell.name}"
            pairs.append(Pair(label, other, cell, paired=False, unlike=_unlike(other, cell)))
    notes = ("hardware: not proved by both sides, so a time is of whatever machine it was",)
    return Sides(base, head, tuple(pairs), not_comparable=tuple(refused), notes=notes)


def arms_of_sweep(
    store: ResultsStore, sweep: str, base: str | None, head: str | None
) -> tuple[str, str]:
    """The two arms of a sweep that are compared, as `two_arms`.

    Raises:
        UsageError: as `two_arms`; or only a plan that is lost says which is the base.
    """
    found = [status.arm for _, _, status in store.statuses(sweep) if status.arm]
    planned = planned_arms(store, sweep)
    known = list(dict.fromkeys([*planned, *found]))
    if not (planned or base or head or "base" in known) and len(known) > 1:
        raise UsageError(
            f"which of the arms {', '.join(known)} of {sweep} is the base is lost with its plan:"
            " run the sweep again, which writes a new plan and counts what is finished"
        )
    return two_arms(sweep, known, base, head)


def planned_arms(store: ResultsStore, sweep: str) -> list[str]:
    """Arms of the plan, in order."""
    return list(plan_of(store, sweep).arm_names)


def two_arms(
    sweep: str, known: Sequence[str], base: str | None, head: str | None
) -> tuple[str, str]:
    """Base and head among the arms `known` of a sweep; None takes those of these names, or order.

    Raises:
        UsageError: fewer than two arms, an unknown one, or the same one twice.
    """
    if len(known) <= 1:
        raise UsageError(
            f"sweep {sweep} has {len(known)} arms; a comparison within one sweep needs two: run it "
            "with --arm base=GITREF --arm head=. --interleave, or name what to compare with"
        )
    for asked in (base, head):
        if asked is not None and asked not in known:
            raise UsageError(f"sweep {sweep} has no arm {asked!r}; arms: {', '.join(known)}")
    before = base or (
        "base" if "base" in known and head != "base" else next(arm for arm in known if arm != head)
    )
    after = head or (
        "head" if "head" in known and before != "head" else next(a for a in known if a != before)
    )
    if before == after:
        raise UsageError(f"base and head are both arm {before!r}; name two arms")
    return before, after


def pair_of_arms(name: str, blocks: Sequence[Block], base: str, head: str) -> Pair:
    """Two arms of the complete `blocks` (at least one) of one cell."""
    before, after = (
        cell_samples(Cell(f"{name} [{arm}]", tuple(Run.of(block[arm]) for block in blocks)))
        for arm in (base, head)
    )
    found = tuple(one for one in _unlike(before, after) if not is_of_dtypes(one))  # arms set them
    return Pair(name, before, after, all(map(is_interleaved, blocks)), found)


def _sweep_pair(base: Cell, head: Cell, *, wanted: bool) -> Pair | tuple[str, str]:
    """wanted: settings that differ were named, to be set aside."""
    label = head.name if base.name == head.name else f"{base.name} -> {head.name}"
    for cell in (head, base):
        if not cell.finished:
            return label, f"{cell.name}: no finished run ({no_number.why_not_finished(cell)})"
    sides = cell_samples(base), cell_samples(head)
    return Pair(label, *sides, paired=False, unlike=() if wanted else _unlike(*sides))


def _unlike(base: CellSamples, head: CellSamples) -> tuple[Unlike, ...]:
    """As far as both say it; without the device, which the hardware says better."""
    if base.workload is None or head.workload is None:
        return ()
    found = unlike(base.workload, head.workload)
    return tuple(one for one in found if one.name != "device")


def _is_of(codes: Codes, record: RunRecord) -> bool:
    """Of the code that counts for its cell and arm, or of a cell that nothing is said about."""
    status = record.status
    code = codes.get((status.cell or "", status.arm))
    return code is None or status.is_of(code)


def _with_plan_of_head(store: ResultsStore, sides: Sides) -> Sides:
    """What the sweep of the head had planned and not run, or pruned; a cell or run has no plan."""
    if sides.head not in store.sweeps():
        return sides
    view = load_sweeps(store, [sides.head])[0]
    missing = [(name, no_number.NOT_RUN) for name in view.not_run]
    plan = plan_of(store, sides.head)
    if not plan.arms:
        runs = [status for _, _, status in store.statuses(sides.head)]
        for cell in [one.id for one in plan.cells if one.id not in view.not_run]:
            there = {(one.repeat, one.arm) for one in runs if one.cell == cell}
            why = no_number.not_run(plan, cell, there, ())
            missing += [(cell, why)] if why else []
    return replace(
        sides, failed=(*sides.failed, *missing), pruned=_pruned(view.pruned), source=view.source
    )


def _pruned(cells: Sequence[PrunedCell]) -> tuple[tuple[str, str], ...]:
    return tuple((cell.id, f"{cell.reason} [{cell.rule}]") for cell in cells)


def _no_such_config(cell: Cell, kept: Sequence[CellSamples]) -> str:
    text = f"no cell of configuration {cell.resolved.config_hash} in the baseline"
    same = [other for other in kept if other.name == cell.name]
    if same and (differs := _unlike(same[0], cell_samples(cell))):
        return text_of(differs)
    return f"{text}; its {cell.name} has configuration {same[0].config_hash}" if same else text


_MOST_NAMED = 5


@dataclass(frozen=True)
class ExpectedRun:
    """One cell of one arm. config_hash: None where the cell cannot be planned on this machine."""

    config_hash: str | None
    code: str


@dataclass(frozen=True)
class Expected:
    """What is asked for.

    runs: by cell and arm. described: arm -> what it is now, in words. changed: of the inputs of a
    run (path -> digest), those that are not what they were.
    """

    runs: Mapping[tuple[str, str | None], ExpectedRun]
    described: Mapping[str | None, str]
    changed: Callable[[Mapping[str, str]], Sequence[str]]

    @property
    def codes(self) -> dict[tuple[str, str | None], str]:
        """Code by cell and arm."""
        return {where: run.code for where, run in self.runs.items()}


def checked(
    sides: Sides, expected: Expected, arms: tuple[str | None, ...], only: Sequence[str] = ()
) -> Sides:
    """`sides`, with expected cells that nobody has measured among those that failed.

    Args:
        sides: the cells that are judged.
        expected: what they are to be.
        arms: of head, and of base before it where base is of the same sweep.
        only: patterns of the cells that are judged, none for all.

    Raises:
        NotComparableError: a cell has another configuration or measured other code.
    """
    wrong = [
        found
        for pair in sides.pairs
        for arm, side in zip(arms, (pair.base, pair.head)[-len(arms) :], strict=True)
        if (found := _difference(side, arm, expected))
    ]
    if wrong:
        hidden = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise NotComparableError(
            f"what was measured is not what is asked for: {'; '.join(wrong[:_MOST_NAMED])}{hidden}."
            f" {WHAT_TO_DO}"
        )
    known = {_cell(pair.head, arms[-1]) for pair in sides.pairs}
    known |= {name for name, _ in (*sides.failed, *sides.pruned, *sides.not_comparable)}
    missing = {cell for cell, arm in expected.runs if arm in arms} - known
    if only:
        missing = {cell for cell in missing if any(fnmatchcase(cell, one) for one in only)}
    return replace(sides, failed=sides.failed + tuple((cell, NOT_RUN) for cell in sorted(missing)))


WHAT_TO_DO = (
    "Run the sweep again to measure what is asked for, or name the sweep by its id to judge what is"
    " there"
)


def _difference(samples: CellSamples, arm: str | None, expected: Expected) -> str:
    cell = _cell(samples, arm)
    wanted = expected.runs.get((cell, arm))
    if wanted is None:
        return ""
    who = f"{cell} [{arm}]" if arm else cell
    if samples.code != code_with_inputs(wanted.code, samples.inputs):
        commit = f"commit {samples.commit[:12]}" if samples.commit else "an unknown commit"
        return (
            f"{who} was measured at {commit} (code {samples.code or 'unknown'}), asked for is"
            f" {expected.described[arm]} (code {wanted.code})"
        )
    if changed := expected.changed(samples.inputs):
        return f"{who} was measured before {', '.join(changed[:_MOST_NAMED])} changed"
    if wanted.config_hash not in (None, samples.config_hash):
        return (
            f"{who} was measured with configuration {samples.config_hash}, asked for is"
            f" {wanted.config_hash}"
        )
    return ""


def _cell(samples: CellSamples, arm: str | None) -> str:
    return samples.name.removesuffix(f" [{arm}]")


_UNHASHED = frozenset({"launch.timeout_seconds", "launch.hang_seconds"})
"""Limits that cannot change a result; see `ResolvedRun.canonical_json`."""
_Flat = tuple[Cell, Mapping[str, Any]]
"""A cell, and its configuration as of `flat_settings`."""


@dataclass(frozen=True)
class Matching:
    """Pairs (base, head), what found no partner, and the settings that were set aside to match."""

    pairs: tuple[tuple[Cell, Cell], ...]
    unmatched_base: tuple[Cell, ...]
    unmatched_head: tuple[Cell, ...]
    set_aside: tuple[str, ...]


def match(base: Sequence[Cell], head: Sequence[Cell], ignore: Sequence[str] = ()) -> Matching:
    """Pair cells whose configurations agree.

    A lone cell is paired with a lone cell. Otherwise the configurations must be equal; if no two
    are, the settings whose sets of values differ between the sides are the axis under comparison
    and are set aside. A configuration that is then not unique on its side finds no partner.

    Args:
        base: cells of one side.
        head: cells of the other.
        ignore: settings to set aside, as `engine.name`, or whole sections, as `dtypes`; with any,
            nothing is found out automatically.
    """
    before, after = flat_settings(base), flat_settings(head)
    bases, heads = list(zip(base, before, strict=True)), list(zip(head, after, strict=True))
    keys = {key for flat in (*before, *after) for key in flat}
    if ignore:
        return _paired(bases, heads, {key for key in keys if _is_under(key, ignore)})
    if len(base) == len(head) == 1:
        return _paired(bases, heads, set(_differing(before[0], after[0])))
    exact = _paired(bases, heads, set())
    if exact.pairs or not base or not head:
        return exact
    return _paired(bases, heads, {k for k in keys if _values(before, k) != _values(after, k)})


def differing_settings(base: Cell, head: Cell) -> list[str]:
    """`setting: base value, head value` for every setting in which two cells differ."""
    before, after = flat_settings([base])[0], flat_settings([head])[0]
    return [
        f"{key}: {before.get(key)!s}, {after.get(key)!s}"
        for key in _differing(before, after)
        # What only one of two engines has is said by their names.
        if not key.startswith("engine.") or (key in before and key in after)
    ]


def _paired(base: Sequence[_Flat], head: Sequence[_Flat], aside: set[str]) -> Matching:
    bases, heads = _by_key(base, aside), _by_key(head, aside)
    pairs = tuple(
        (cells[0], heads[key][0])
        for key, cells in bases.items()
        if len(cells) == 1 and len(heads.get(key, [])) == 1
    )
    used = {id(cell) for pair in pairs for cell in pair}
    return Matching(
        pairs,
        tuple(cell for cell, _ in base if id(cell) not in used),
        tuple(cell for cell, _ in head if id(cell) not in used),
        tuple(sorted(aside)),
    )


def _by_key(side: Sequence[_Flat], aside: set[str]) -> dict[frozenset[object], list[Cell]]:
    grouped: dict[frozenset[object], list[Cell]] = {}
    for cell, flat in side:
        # An absent setting is one that is open: an engine has only settings of its own.
        known = ((k, repr(v)) for k, v in flat.items() if k not in aside and v is not None)
        grouped.setdefault(frozenset(known), []).append(cell)
    return grouped


def flat_settings(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The configuration of every cell as one level of settings, as `engine.name`."""
    return [_flattened(cell.resolved.model_dump(mode="json")) for cell in cells]


def _flattened(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in document.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(_flattened(value, f"{path}."))
        elif path not in _UNHASHED:
            flat[path] = value
    return flat


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def _values(flats: Sequence[Mapping[str, Any]], key: str) -> set[str]:
    return {repr(flat.get(key)) for flat in flats}


def _is_under(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
