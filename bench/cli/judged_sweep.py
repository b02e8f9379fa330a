"""Which sweep `gate` and `compare` judge, and by which policy.

A sweep is named by its id, or is what a file asks for. A file and its arms are resolved as `run`
resolves them, so that a refusal, a failure or a change since the last run never passes for a
verdict on the code of today.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.cli import console
from bench.cli.chosen_sweep import ChosenSweep, choose, commit_text, find_sweep_file
from bench.cli.options import SweepRequest
from bench.errors import NotComparableError, NothingMeasuredError, UsageError
from bench.launch.inputs import changed_inputs
from bench.plan import Plan
from bench.store import ResultsStore
from reports.compare.policy import Policy, parse_policy
from reports.compare.sides import WHAT_TO_DO, Expected, ExpectedRun
from sweeps.document import read_document
from sweeps.suggest import did_you_mean


@dataclass(frozen=True)
class JudgedSweep:
    """Its id, and what is expected of it; None where it was named by its id."""

    id: str
    expected: Expected | None = None


def judged_sweep(store: ResultsStore, named: str, arms: Sequence[str]) -> JudgedSweep:
    """The sweep that `named` (an id or a sweep file) and its arms mean.

    Raises:
        UsageError: neither, or an arm cannot be what it is asked to be.
        NothingMeasuredError: the file was never run with these arms.
        NotComparableError: it was, when an arm had other code.
    """
    if not arms and (any(store.records(sweep=named)) or named in store.imports.ids()):
        return JudgedSweep(named)
    if find_sweep_file(Path(named)) is not None:
        request = SweepRequest(sweep=Path(named), arms=tuple(arms))
        return _measured(store, choose(request, to_run=False).prepared(store))
    known = store.sweeps()
    if named in known and arms:
        raise UsageError(
            f"{named} is the id of a sweep, whose arms were given when it was run; --arm goes with"
            " a sweep file, as in SWEEP.yaml --arm base=main --arm head=."
        )
    same = store.sweeps_called(named)
    if len(same) == 1:
        return JudgedSweep(same[0])
    if same:
        raise UsageError(f"{len(same)} sweeps are called {named}: {', '.join(same)}; name one")
    raise UsageError(
        f"{named!r} is neither a sweep file nor a sweep in {store.root} "
        f"({', '.join(known) or 'none'}){did_you_mean(named, known)}"
    )


def expected_of(asked: ChosenSweep, stored: Plan) -> Expected:
    """What the runs of `stored` are to be now. Of cells that cannot run here, only their code.

    Args:
        asked: prepared.
        stored: the plan that was run.
    """
    here = {cell.id: cell for cell in asked.chosen.cells}
    merged = {cell.id for cell in asked.chosen.duplicates}
    cells = {cell.id: cell for cell in stored.cells if cell.id not in merged} | here
    return Expected(
        {
            (cell.id, arm): ExpectedRun(
                cell.of(arm).config_hash if cell.id in here else None,
                side.code_identity(cell.of(arm)),
            )
            for cell in cells.values()
            for arm, side in asked.sides.items()
        },
        {arm.name: commit_text(arm) for arm in asked.whole.arms} or {None: "the working tree"},
        changed_inputs,
    )


def _measured(store: ResultsStore, asked: ChosenSweep) -> JudgedSweep:
    """The sweep of the results folder that measured what is asked for.

    Raises:
        NothingMeasuredError: the file was never run with arms of these names.
        NotComparableError: it was, when an arm had other code.
    """
    names = {*store.sweeps_called(asked.asked_id), *store.sweeps_of_arms(asked.asked_id)}
    found = [
        Plan.from_document(store.read_plan(name))
        for name in sorted(names)
        if any(store.statuses(name))
    ]
    if not found:
        known = ", ".join(store.sweeps()) or "none"
        arms = " with " + " and ".join(arm.name for arm in asked.arms) if asked.arms else ""
        raise NothingMeasuredError(
            f"{asked.whole.source} was never measured{arms}: {store.root} holds {known}; run it"
        )
    own = sorted(found, key=lambda plan: plan.id != asked.id)
    differences = [_first_difference(plan, asked) for plan in own]
    for stored, difference in zip(own, differences, strict=True):
        if difference is None:
            _remark_on_commits(stored, asked)
            return JudgedSweep(stored.id, expected_of(asked, stored))
    lines = [f"{plan.id} measured {what}" for plan, what in zip(own, differences, strict=True)]
    raise NotComparableError(
        f"what is asked for was not measured: {'; '.join(lines[:3])}. {WHAT_TO_DO}"
    )


def _first_difference(stored: Plan, asked: ChosenSweep) -> str | None:
    """An arm of `stored` whose code is not what is asked for, with both identities."""
    arms_now = {arm.name: arm for arm in asked.whole.arms}
    for arm in stored.arms:
        if arm.name not in asked.sides:
            return f"arm {arm.name}, which is not asked for"
        for cell in stored.cells:
            now = asked.sides[arm.name].code_identity(cell.of(arm.name))
            then = arm.codes.get(cell.id, now)
            if then != now:
                return (
                    f"{arm.name} at {commit_text(arm)} (code {then}), asked for is"
                    f" {commit_text(arms_now[arm.name])} (code {now})"
                )
    return None


def _remark_on_commits(stored: Plan, asked: ChosenSweep) -> None:
    now = {arm.name: arm for arm in asked.whole.arms}
    for arm in stored.arms:
        if arm.commit != now[arm.name].commit:
            console.note(
                f"arm {arm.name} was measured at {commit_text(arm)}, whose code is that of"
                f" {commit_text(now[arm.name])}"
            )


def read_policy(path: Path | None) -> Policy:
    """The policy of a file, or the default one.

    Raises:
        UsageError: the file cannot be read, or is wrong; with lines.
    """
    if path is None:
        return Policy()
    document = read_document(path, "metrics")
    return parse_policy(document.data, document.line, document.source)
