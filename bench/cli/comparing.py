"""`compare`: the command line in front of `reports.comparisons` and the verdicts of the gate."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.cli import console, exit_codes
from bench.cli.judged_sweep import JudgedSweep, judged_sweep
from bench.cli.policies import read_policy
from bench.errors import NotComparableError, NothingMeasuredError, UsageError
from bench.store import ResultsStore
from reports.comparisons import logs
from reports.comparisons.imported import CAPTION, absences, of_cell, of_import, side_by_side
from reports.comparisons.imported import to_data as to_data_beside
from reports.gates import gate_text
from reports.gates.expected import checked
from reports.gates.gate import GateResult, gate
from reports.gates.noise import calibrations
from reports.gates.pairing import NOT_RUN, arms_of_sweep, sides_of_arms, sides_of_sweeps
from reports.gates.policy import Policy
from reports.gates.target_verdicts import judge_targets, target_table
from reports.gates.target_verdicts import to_data as targets_to_data
from reports.renderers import markdown, terminal
from reports.views.sweep_view import load_side
from sweeps.suggest import did_you_mean

_FORMATS = ("table", "md")
_MOST_REASONS = 5


def show_comparison(
    results: Path,
    base: str,
    head: str | None,
    *,
    ignore: Sequence[str],
    policy: Path | None,
    form: str,
    as_json: bool,
    arms: Sequence[str] = (),
) -> int:
    """Print a comparison; of the arms of `base` where there is no head.

    `ignore` are settings to set aside when cells are matched. `arms`: of the sweep file `base`.

    Raises:
        UsageError: an unknown name or format.
        NothingMeasuredError: a side has no finished run.
        NotComparableError: nothing of the two sides can be compared.
    """
    if form not in _FORMATS:
        raise UsageError(
            f"--format: expected one of {', '.join(_FORMATS)}, found {form!r}"
            f"{did_you_mean(form, _FORMATS)}"
        )
    rules = read_policy(policy)
    store = ResultsStore.open(results, create=False)
    if head is None:
        found = judged_sweep(store, base, arms)
        return _show_arms(store, found, rules, form=form, as_json=as_json)
    if arms:
        raise UsageError("--arm compares the arms of one sweep file; leave HEAD out")
    base, head = (_called(store, name) for name in (base, head))
    if {base, head} & {*store.imports.ids()}:
        return _show_beside(store, base, head, form=form, as_json=as_json)
    sides = sides_of_sweeps(store, base, head, ignore)
    judged = gate(sides, rules, calibrations(store), any_nodes=True)
    _refuse_nothing(judged, "name the settings to set aside with --ignore, or compare single cells")
    now = datetime.now(UTC)
    if as_json:
        console.data_json({"verdicts": gate_text.to_data(judged, now)})
    else:
        console.data(gate_text.verdicts(judged, now, form=form).rstrip("\n"))
    return exit_codes.OK


def _refuse_nothing(judged: GateResult, advice: str) -> None:
    """Raise where no pair can be compared: nothing was measured, or nothing matches."""
    if not judged.nothing_comparable:
        return
    sides = judged.sides
    names = f"{sides.base} and {sides.head}"
    lost = [f"{cell}: {why}" for cell, why in sides.failed if why != NOT_RUN]
    reasons = [f"{cell}: {why}" for cell, why in sides.not_comparable]
    if lost or not reasons:
        why = "; ".join((lost or [f"{cell}: {why}" for cell, why in sides.failed])[:_MOST_REASONS])
        raise NothingMeasuredError(f"{names} have nothing to compare: {why}")
    raise NotComparableError(
        f"nothing in {names} can be compared: {'; '.join(reasons[:_MOST_REASONS])}; {advice}"
    )


def _called(store: ResultsStore, name: str) -> str:
    """The only sweep of this name, where its arms are left out of it; else the name as it is."""
    found = store.sweeps_called(name)
    return found[0] if len(found) == 1 else name


def _show_beside(store: ResultsStore, base: str, head: str, *, form: str, as_json: bool) -> int:
    """Runs of which one at least is imported: numbers beside each other, and no verdict."""
    imported = store.imports.ids()
    shown = [
        one
        for name in (base, head)
        for one in (
            [of_import(store.imports.read(name))]
            if name in imported
            else [of_cell(cell) for cell in load_side(store, name) if cell.finished]
        )
    ]
    two = (
        [store.imports.read(name) for name in (base, head)] if {base, head} <= {*imported} else None
    )
    if as_json:
        data = {"side_by_side": to_data_beside(shown), "verdicts": None}
        console.data_json(data | ({} if two is None else {"parity": logs.parity_data(*two)}))
        return exit_codes.OK
    render = markdown.table if form == "md" else terminal.table
    console.data(render(side_by_side(shown)).rstrip("\n") + f"\n\n{CAPTION}")
    if two is not None:
        tables = (
            logs.parity_table(logs.differences(*two)),
            logs.change_table(logs.changes(*two)),
        )
        for table in tables:
            if table.rows:
                console.data("\n" + render(table).rstrip("\n"))
        console.data(f"\n{logs.CAPTION}")
    for name, missing in absences(shown):
        console.data(f"{name} does not say: {missing}")
    return exit_codes.OK


def _show_arms(
    store: ResultsStore, judged_one: JudgedSweep, policy: Policy, *, form: str, as_json: bool
) -> int:
    sweep, expected = judged_one.id, judged_one.expected
    arms = arms_of_sweep(store, sweep, None, None)
    sides = sides_of_arms(store, sweep, *arms, None if expected is None else expected.codes)
    if expected is not None:
        sides = checked(sides, expected, arms)
    judged = gate(sides, policy, calibrations(store), any_nodes=True)
    _refuse_nothing(judged, "run the arms on one kind of hardware")
    now = datetime.now(UTC)
    targets = judge_targets(store, sweep) if sweep in store.sweeps() else []
    if as_json:
        verdicts = gate_text.to_data(judged, now)
        console.data_json(verdicts | {"targets": targets_to_data(targets)})
        return exit_codes.OK
    console.data(gate_text.verdicts(judged, now, form=form).rstrip("\n"))
    if targets:
        render = markdown.table if form == "md" else terminal.table
        console.data("\n" + render(target_table(targets)).rstrip("\n"))
    return exit_codes.OK
