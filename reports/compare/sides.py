"""Who is head and who is base: two arms of one sweep, two sweeps, a baseline, imported runs.

A name says little: `head` may be one commit today and another tomorrow. So whoever names a sweep
file gets numbers of its configurations and of the code that its arms are now, or none at all
(`checked`). Cells of two sweeps belong together by configuration, not by name (`match`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from bench.derive.blocks import Block, complete_blocks, is_interleaved
from bench.derive.hardware import STATED
from bench.derive.metrics import Metric
from bench.errors import NotComparableError, UsageError
from bench.plan import PrunedCell
from bench.record import code_with_inputs
from bench.store import ResultsStore
from reports.compare.samples import CellSamples, cell_samples, imported_samples
from reports.compare.unlike import Unlike, is_of_dtypes, text_of, unlike_paces
from reports.renderers import quantity
from reports.views import no_number
from reports.views.cells import Cell, Run
from reports.views.sweep_view import Codes, load_side, load_sweeps, plan_of

_MOST_NAMED = 5
_UNHASHED = frozenset({"launch.timeout_seconds", "launch.hang_seconds"})
"""Limits that cannot change a result; see `ResolvedRun.canonical_json`."""

Reasons = tuple[tuple[str, str], ...]
"""(cell, why)."""
WHAT_TO_DO = (
    "Run the sweep again to measure what is requested, or name the sweep by its id to judge what is"
    " there"
)


@dataclass(frozen=True)
class Pair:
    """One cell on both sides. paired: its runs were made in blocks, in an order that was drawn.

    unlike: in what the sides may not be compared, besides the hardware.
    """

    label: str
    base: CellSamples
    head: CellSamples
    paired: bool = False
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

    failed: cells that were planned and gave no number. source: the sweep file, if known. set_aside:
    settings in which the sides differ and that were left out when matching. differences: of a
    single pair, with both values. arms: base and head, where both are of one sweep.
    """

    base: str
    head: str
    pairs: tuple[Pair, ...]
    failed: Reasons = ()
    not_comparable: Reasons = ()
    pruned: Reasons = ()
    notes: tuple[str, ...] = ()
    source: str = ""
    set_aside: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()

    def selected(self, patterns: Sequence[str]) -> Sides:
        """Only the cells that one of `patterns` means.

        Raises:
            UsageError: one of them means none.
        """
        listed = ("failed", "not_comparable", "pruned")
        reasons: dict[str, Any] = {name: getattr(self, name) for name in listed}
        names = [pair.label for pair in self.pairs]
        kept = matching([*names, *(c for each in reasons.values() for c, _ in each)], patterns)
        reasons = {n: tuple(r for r in each if r[0] in kept) for n, each in reasons.items()}
        pairs = tuple(pair for pair in self.pairs if pair.label in kept)
        return replace(self, pairs=pairs, **reasons)


def matching(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """The cells that one of `patterns` means, as `zero3` or `fsdp2-*`; a pair by either of its two.

    Raises:
        UsageError: one of them means none.
    """
    matched: set[str] = set()
    for pattern in patterns:
        own = {
            name
            for name in names
            if any(part == pattern or fnmatchcase(part, pattern) for part in name.split(" -> "))
        }
        if not own:
            known = ", ".join(dict.fromkeys(names)) or "none"
            raise UsageError(f"--only {pattern}: no such cell; expected {known}, or a pattern")
        matched |= own
    return matched


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
    codes = plan.codes if codes is None else codes
    runs = [
        (codes.get((str(r.status.cell or ""), r.status.arm)), r) for r in store.records(sweep=sweep)
    ]
    records = [r for code, r in runs if r.status.arm and (code is None or r.status.is_of(code))]
    blocks = complete_blocks(records, [before, after])
    pairs, failed, notes = [], [], []
    for name in dict.fromkeys([*(cell.id for cell in plan.cells), *blocks]):
        members = [r for r in records if r.status.cell == name]
        if not blocks.get(name):
            failed.append((name, no_number.why_no_block(members, before, after)))
            continue
        pairs.append(_pair_of_arms(name, blocks[name], before, after))
        if lost := len({r.status.repeat for r in members}) - len(blocks[name]):
            notes.append(f"{name}: {lost} of its blocks are not complete and are left out")
        there = {(run.status.repeat, run.status.arm) for run in members}
        why = no_number.lost_to_a_failure(members, blocks[name][-1])
        if why := why or no_number.not_run(plan, name, there, (before, after)):
            failed.append((name, why))
    return Sides(
        base=f"{sweep} [{before}]",
        head=f"{sweep} [{after}]",
        pairs=tuple(pairs),
        failed=tuple(failed),
        pruned=_pruned(plan.pruned),
        notes=tuple(notes),
        source=plan.source,
        arms=(before, after),
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
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    if arm is None and len(arms) <= 1:  # no arms, or a single cell of one
        return cells
    if arm not in arms:
        known = ", ".join(map(str, arms))
        named = "found none of them" if arm is None else f"found {arm!r}"
        raise UsageError(f"{name} was run with the arms {known}; name one of them, {named}")
    return [replace(cell, name=cell.name_without_arm) for cell in cells if cell.arm == arm]


def samples_of(
    store: ResultsStore, name: str, arm: str | None = None, codes: Codes | None = None
) -> list[CellSamples]:
    """As `cells_of`, of those that finished; or of an imported run."""
    if name in store.imports.ids():
        return [imported_samples(store.imports.read(name))]
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

    base, head: as `load_side` understands them. ignore: settings to set aside when cells are
    matched. arms: of base and of head, where they have any. codes: as for `cells_of`, of head.

    Raises:
        UsageError: a name that is nothing, or arms and none of them chosen.
    """
    if {base, head} & {*store.imports.ids()}:
        before, after = (samples_of(store, *named) for named in ((base, arms[0]), (head, arms[1])))
        return stated_sides(base, before, head, after)
    cells = cells_of(store, base, arms[0]), cells_of(store, head, arms[1], codes)
    matched = match(*cells, ignore)
    pairs, failed = [], []
    for ours, theirs in matched.pairs:
        label = _label(ours.name, theirs.name)
        if lost := next((cell for cell in (theirs, ours) if not cell.finished), None):
            failed.append((label, f"{lost.name}: {_no_finished_run(lost)}"))
            continue
        samples = cell_samples(ours), cell_samples(theirs)
        pairs.append(Pair(label, *samples, unlike=() if ignore else _unlike(*samples)))
    failed += [(c.name, why) for c in cells[1] if c.finished and (why := no_number.lost_repeat(c))]
    refused = [
        (cell.name, f"no cell of equal configuration in {side}")
        for side, unmatched in (("base", matched.unmatched_head), ("head", matched.unmatched_base))
        for cell in unmatched
    ]
    single = matched.pairs if len(matched.pairs) == 1 else ()
    sides = Sides(
        base,
        head,
        tuple(pairs),
        tuple(failed),
        tuple(refused),
        set_aside=matched.set_aside,
        differences=tuple(text for pair in single for text in _differences(*pair)),
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
    base = f"baseline {name}"
    is_import = head in store.imports.ids()
    if is_import or any(cell.hardware.kind == STATED for cell in kept):
        sides = stated_sides(base, kept, head, samples_of(store, head, arm, codes))
        return sides if is_import else _with_plan_of_head(store, sides)
    by_config = {cell.config_hash: cell for cell in kept}
    pairs, failed, refused = [], [], []
    for cell in cells_of(store, head, arm, codes):
        partner = by_config.pop(cell.resolved.config_hash, None)
        if not cell.finished:
            failed.append((cell.name, _no_finished_run(cell)))
        elif partner is None:
            refused.append((cell.name, _no_such_config(cell, kept)))
        else:
            pairs.append(Pair(cell.name, partner, cell_samples(cell)))
            why = no_number.lost_repeat(cell)
            failed += [(cell.name, why)] if why else []
    refused += [(c.name, f"only in {base}") for c in by_config.values()]
    return _with_plan_of_head(store, Sides(base, head, tuple(pairs), tuple(failed), tuple(refused)))


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
            label = _label(other.name, cell.name)
            pairs.append(Pair(label, other, cell, unlike=_unlike(other, cell)))
    notes = ("hardware: not proved by both sides, so a time is of whatever machine it was",)
    return Sides(base, head, tuple(pairs), not_comparable=tuple(refused), notes=notes)


def arms_of_sweep(
    store: ResultsStore, sweep: str, base: str | None, head: str | None
) -> tuple[str, str]:
    """The two arms of a sweep that are compared, as `two_arms`.

    Raises:
        UsageError: as `two_arms`; or only a plan that is lost says which is the base.
    """
    planned = plan_of(store, sweep).arm_names
    ran = [status.arm for _, _, status in store.statuses(sweep) if status.arm]
    known = list(dict.fromkeys([*planned, *ran]))
    if not (planned or base or head or "base" in known) and len(known) > 1:
        raise UsageError(
            f"which of the arms {', '.join(known)} of {sweep} is the base is lost with its plan:"
            " run the sweep again, which writes a new plan and counts what is finished"
        )
    return two_arms(sweep, known, base, head)


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
    for arm in (base, head):
        if arm is not None and arm not in known:
            raise UsageError(f"sweep {sweep} has no arm {arm!r}; arms: {', '.join(known)}")

    def usual(name: str, other: str | None) -> str:
        return name if name in known and other != name else next(a for a in known if a != other)

    before = base or usual("base", head)
    after = head or usual("head", before)
    if before == after:
        raise UsageError(f"base and head are both arm {before!r}; name two arms")
    return before, after


def _pair_of_arms(name: str, blocks: Sequence[Block], base: str, head: str) -> Pair:
    """Two arms of the complete `blocks` (at least one) of one cell."""
    before, after = (
        cell_samples(Cell(f"{name} [{arm}]", tuple(Run.of(block[arm]) for block in blocks)))
        for arm in (base, head)
    )
    differing = tuple(why for why in _unlike(before, after) if not is_of_dtypes(why))  # of arms
    return Pair(name, before, after, all(map(is_interleaved, blocks)), differing)


def _label(base: str, head: str) -> str:
    return head if base == head else f"{base} -> {head}"


def _unlike(base: CellSamples, head: CellSamples) -> tuple[Unlike, ...]:
    """As far as both say it; measured devices are compared as hardware."""
    is_stated = STATED in (base.hardware.kind, head.hardware.kind)
    differences = unlike_paces(base.pace, head.pace)
    return tuple(why for why in differences if is_stated or why.name != "device")


def _no_finished_run(cell: Cell) -> str:
    return f"no finished run ({no_number.why_not_finished(cell)})"


def _with_plan_of_head(store: ResultsStore, sides: Sides) -> Sides:
    """What the sweep of the head had planned and not run, or pruned; a cell or run has no plan."""
    if sides.head not in store.sweeps():
        return sides
    view = load_sweeps(store, [sides.head])[0]
    missing = [(name, no_number.NOT_RUN) for name in view.not_run]
    plan = plan_of(store, sides.head)
    runs = [status for _, _, status in store.statuses(sides.head)]
    for cell in () if plan.arms else plan.cells:
        there = {(run.repeat, run.arm) for run in runs if run.cell == cell.id}
        why = "" if cell.id in view.not_run else no_number.not_run(plan, cell.id, there, ())
        missing += [(cell.id, why)] if why else []
    return replace(
        sides, failed=(*sides.failed, *missing), pruned=_pruned(view.pruned), source=view.source
    )


def _pruned(cells: Sequence[PrunedCell]) -> Reasons:
    return tuple((cell.id, f"{cell.reason} [{cell.rule}]") for cell in cells)


def _no_such_config(cell: Cell, kept: Sequence[CellSamples]) -> str:
    text = f"no cell of configuration {cell.resolved.config_hash} in the baseline"
    same = next((other for other in kept if other.name == cell.name), None)
    if same is None:
        return text
    differing = text_of(_unlike(same, cell_samples(cell)))
    return differing or f"{text}; its {cell.name} has configuration {same.config_hash}"


# Whether that is what somebody means now.


class ExpectedRun(NamedTuple):
    """One cell of one arm. config_hash: None where the cell cannot be planned on this machine."""

    config_hash: str | None
    code: str


@dataclass(frozen=True)
class JudgedSweep:
    """A sweep of a results folder, and what was meant, if it was named by its file.

    runs: by cell and arm, what they are to be; None of a sweep that was named by its id. described:
    arm -> what it is now, in words. changed: of the inputs of a run (path -> digest), those that
    are not what they were.
    """

    id: str
    runs: Mapping[tuple[str, str | None], ExpectedRun] | None = None
    described: Mapping[str | None, str] = field(default_factory=dict)
    changed: Callable[[Mapping[str, str]], Sequence[str]] = lambda _: ()

    @property
    def codes(self) -> Codes | None:
        """Code by cell and arm."""
        return None if self.runs is None else {at: run.code for at, run in self.runs.items()}

    def checked(self, sides: Sides, head_arm: str | None = None, only: Sequence[str] = ()) -> Sides:
        """`sides`, with expected cells that nobody has measured among those that failed.

        Args:
            sides: the cells that are judged.
            head_arm: of the head, where the base is of another sweep.
            only: patterns of the cells that are judged, none for all.

        Raises:
            NotComparableError: a cell has another configuration or measured other code.
        """
        if self.runs is None:
            return sides
        arms: tuple[str | None, ...] = sides.arms or (head_arm,)
        wrong = [
            difference
            for pair in sides.pairs
            for arm, side in zip(arms, (pair.base, pair.head)[-len(arms) :], strict=True)
            if (wanted := self.runs.get((_cell(side, arm), arm)))
            if (difference := self._unexpected(side, arm, wanted))
        ]
        if wrong:
            named = quantity.few(wrong, _MOST_NAMED)
            what = "what was measured is not what is requested"
            raise NotComparableError(f"{what}: {named}. {WHAT_TO_DO}")
        known = {_cell(pair.head, arms[-1]) for pair in sides.pairs}
        known |= {name for name, _ in (*sides.failed, *sides.pruned, *sides.not_comparable)}
        missing = {cell for cell, arm in self.runs if arm in arms} - known
        if only:
            missing = {cell for cell in missing if any(fnmatchcase(cell, p) for p in only)}
        not_run = tuple((cell, no_number.NOT_RUN) for cell in sorted(missing))
        return replace(sides, failed=sides.failed + not_run)

    def _unexpected(self, samples: CellSamples, arm: str | None, wanted: ExpectedRun) -> str:
        """How what was measured differs from what is expected of the cell; "" if in nothing."""
        cell, config = _cell(samples, arm), samples.config_hash
        who = f"{cell} [{arm}] was measured" if arm else f"{cell} was measured"
        if samples.code != code_with_inputs(wanted.code, samples.inputs):
            commit = f"commit {samples.commit[:12]}" if samples.commit else "an unknown commit"
            return (
                f"{who} at {commit} (code {samples.code or 'unknown'}), requested is"
                f" {self.described[arm]} (code {wanted.code})"
            )
        if changed := self.changed(samples.inputs):
            return f"{who} before {', '.join(changed[:_MOST_NAMED])} changed"
        if wanted.config_hash not in (None, config):
            return f"{who} with configuration {config}, requested is {wanted.config_hash}"
        return ""


def _cell(samples: CellSamples, arm: str | None) -> str:
    return samples.name.removesuffix(f" [{arm}]")


# Which cell of one side belongs to which of the other.


class Matching(NamedTuple):
    """Pairs (base, head), what has no partner, and the settings that were set aside to match."""

    pairs: tuple[tuple[Cell, Cell], ...]
    unmatched_base: tuple[Cell, ...]
    unmatched_head: tuple[Cell, ...]
    set_aside: tuple[str, ...]


def match(base: Sequence[Cell], head: Sequence[Cell], ignore: Sequence[str] = ()) -> Matching:
    """Pair cells whose configurations agree.

    A lone cell is paired with a lone cell. Otherwise the configurations must be equal; if no two
    are, the settings whose sets of values differ between the sides are the axis under comparison
    and are set aside. A configuration that is then not unique on its side has no partner.

    Args:
        base: cells of one side.
        head: cells of the other.
        ignore: settings to set aside, as `engine.name`, or whole sections, as `dtypes`; with any,
            nothing is found out automatically.
    """
    before, after = ([(cell, _settings(cell)) for cell in side] for side in (base, head))
    keys = {key for _, settings in (*before, *after) for key in settings}
    if ignore:
        under = {k for k in keys if any(k == path or k.startswith(f"{path}.") for path in ignore)}
        return _paired(before, after, under)
    if len(base) == len(head) == 1:
        return _paired(before, after, set(_differing(before[0][1], after[0][1])))
    exact = _paired(before, after, set())
    if exact.pairs or not base or not head:
        return exact
    return _paired(before, after, {k for k in keys if _values(before, k) != _values(after, k)})


_Configured = Sequence[tuple[Cell, Mapping[str, Any]]]
"""Cells with their settings on one level."""


def _paired(base: _Configured, head: _Configured, aside: set[str]) -> Matching:
    bases, heads = _by_key(base, aside), _by_key(head, aside)
    pairs = tuple(
        (cells[0], heads[key][0])
        for key, cells in bases.items()
        if len(cells) == 1 and len(heads.get(key, [])) == 1
    )
    used = {id(cell) for pair in pairs for cell in pair}
    ours, theirs = (
        tuple(cell for cell, _ in side if id(cell) not in used) for side in (base, head)
    )
    return Matching(pairs, ours, theirs, tuple(sorted(aside)))


def _by_key(side: _Configured, aside: set[str]) -> dict[frozenset[object], list[Cell]]:
    grouped: dict[frozenset[object], list[Cell]] = {}
    for cell, settings in side:
        # An absent setting is one that is open: an engine has only settings of its own.
        known = ((k, repr(v)) for k, v in settings.items() if k not in aside and v is not None)
        grouped.setdefault(frozenset(known), []).append(cell)
    return grouped


def _settings(cell: Cell) -> dict[str, Any]:
    """The configuration as one level of settings, as `engine.name`."""

    def flattened(document: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for key, value in document.items():
            inner = isinstance(value, Mapping)
            flat |= flattened(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
        return flat

    flat = flattened(cell.resolved.model_dump(mode="json"), "")
    return {key: value for key, value in flat.items() if key not in _UNHASHED}


def _differences(base: Cell, head: Cell) -> list[str]:
    """`setting: base value, head value` for every setting in which two cells differ."""
    before, after = _settings(base), _settings(head)
    return [
        f"{key}: {before.get(key)!s}, {after.get(key)!s}"
        for key in _differing(before, after)
        # What only one of two engines has is said by their names.
        if not key.startswith("engine.") or (key in before and key in after)
    ]


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def _values(side: _Configured, key: str) -> set[str]:
    return {repr(settings.get(key)) for _, settings in side}
