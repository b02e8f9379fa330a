"""Two sweeps, cells or runs side by side: matched by configuration, refused where incomparable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.derive.hardware import hardware_key
from bench.errors import NotComparableError, NothingMeasuredError, UsageError
from bench.store import ResultsStore
from reports.comparisons.change import Change, change_between
from reports.views.cells import Cell, make_cell
from reports.views.machine import describe_hardware
from reports.views.matching import Matching, differing_settings, match
from reports.views.sweep_view import load_sweeps

_MOST_REASONS = 5


@dataclass(frozen=True)
class Comparison:
    """Head against base. Every cell of both sides is in exactly one of the four tuples.

    labels: a name per change. not_comparable: (name, reason). set_aside: settings in which the
    sides differ and that were left out when matching.
    """

    base: str
    head: str
    changes: tuple[Change, ...]
    labels: tuple[str, ...]
    not_comparable: tuple[tuple[str, str], ...]
    unmatched_base: tuple[str, ...]
    unmatched_head: tuple[str, ...]
    set_aside: tuple[str, ...]

    @property
    def differences(self) -> tuple[str, ...]:
        """For a single pair: the settings in which it differs, with both values."""
        if len(self.changes) != 1:
            return ()
        return tuple(differing_settings(self.changes[0].base, self.changes[0].head))


def compare(store: ResultsStore, base: str, head: str, *, ignore: Sequence[str] = ()) -> Comparison:
    """Compare what `base` and `head` name.

    Args:
        store: the results folder.
        base: a sweep id, `SWEEP:CELL`, or a run id or a unique part of one.
        head: the same; the change is head against base.
        ignore: settings to set aside when matching, as `engine.name` or `dtypes`.

    Raises:
        UsageError: a name that is nothing, or not unique.
        NothingMeasuredError: a side without any finished run.
        NotComparableError: no cell has a partner, or every pair differs in hardware or schema.
    """
    before, after = load_side(store, base), load_side(store, head)
    for name, cells in ((base, before), (head, after)):
        if not any(cell.finished for cell in cells):
            raise NothingMeasuredError(f"{name} has no finished run: nothing to compare")
    matching = match(before, after, ignore)
    if not matching.pairs:
        raise NotComparableError(_no_pairs(base, head, matching))
    changes, labels, refused = [], [], []
    for one, other in matching.pairs:
        label = one.name if one.name == other.name else f"{one.name} -> {other.name}"
        reason = incomparable(one, other)
        if reason:
            refused.append((label, reason))
        else:
            changes.append(change_between(one, other))
            labels.append(label)
    if not changes:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused[:_MOST_REASONS])
        raise NotComparableError(f"nothing in {base} and {head} can be compared: {reasons}")
    return Comparison(
        base=base,
        head=head,
        changes=tuple(changes),
        labels=tuple(labels),
        not_comparable=tuple(refused),
        unmatched_base=tuple(cell.name for cell in matching.unmatched_base),
        unmatched_head=tuple(cell.name for cell in matching.unmatched_head),
        set_aside=matching.set_aside,
    )


def load_side(
    store: ResultsStore, name: str, codes: Mapping[tuple[str, str | None], str] | None = None
) -> list[Cell]:
    """The cells that `name` stands for; of a whole sweep, those of `codes` as in `load_sweeps`.

    Raises:
        UsageError: no sweep, cell or run has this name, or several runs do.
    """
    if name in store.sweeps() or any(store.records(sweep=name)):
        return list(load_sweeps(store, [name], codes)[0].cells)
    sweep, colon, cell_name = name.partition(":")
    if colon and (sweep in store.sweeps() or any(store.records(sweep=sweep))):
        cells = load_sweeps(store, [sweep])[0].cells
        found = [cell for cell in cells if cell.name == cell_name]
        if not found:
            known = ", ".join(cell.name for cell in cells) or "none has run"
            raise UsageError(f"sweep {sweep} has no cell {cell_name!r} that ran; cells: {known}")
        return found
    try:
        record = store.read(name)
    except UsageError as error:
        known = ", ".join(store.sweeps()) or "none"
        raise UsageError(
            f"{name!r} is neither a sweep ({known}) nor SWEEP:CELL nor a run: {error}"
        ) from error
    return [make_cell(record.run_id, [record])]


def incomparable(base: Cell, head: Cell) -> str:
    """Why two cells may not be compared; empty if they may."""
    for cell in (base, head):
        if not cell.finished:
            states = ", ".join(sorted({run.record.status.state for run in cell.runs}))
            return f"{cell.name} has no finished run ({states})"
    before, after = base.finished[0].record, head.finished[0].record
    if before.status.schema_version != after.status.schema_version:
        return (
            f"schema versions differ: {before.status.schema_version} and "
            f"{after.status.schema_version}"
        )
    if hardware_key(before) != hardware_key(after):
        return f"hardware differs: {describe_hardware(before)} and {describe_hardware(after)}"
    return ""


def _no_pairs(base: str, head: str, matching: Matching) -> str:
    text = (
        f"no cell of {base} ({len(matching.unmatched_base)}) has a partner of equal configuration "
        f"in {head} ({len(matching.unmatched_head)})"
    )
    if matching.set_aside:
        text += f", even with these settings set aside: {', '.join(matching.set_aside)}"
    return f"{text}; name the settings to set aside with --ignore, or compare single cells"
