"""Which sweep `gate` and `compare` judge: one that is named by its id, or what a file asks for.

A file and its arms are resolved as `run` resolves them, so that a refusal, a failure or a change
since the last run never passes for a verdict on the code of today.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.cli import console
from bench.cli.arm_preparation import commit_text, prepared_sides
from bench.cli.options import SweepRequest
from bench.cli.planning import RequestedPlan, requested_plan
from bench.cli.sweep_files import find_sweep_file
from bench.errors import NotComparableError, NothingMeasuredError, UsageError
from bench.store import ResultsStore
from reports.gates.expected import WHAT_TO_DO, Expected, ExpectedRun
from sweeps.execution import Sides
from sweeps.plan import Plan
from sweeps.suggest import did_you_mean


@dataclass(frozen=True)
class Resolved:
    """A sweep file and its arms as they are now: what `run` would run."""

    plans: RequestedPlan
    sides: Sides

    @property
    def described(self) -> dict[str | None, str]:
        """Arm -> what it is now."""
        arms = self.plans.whole.arms
        return {arm.name: commit_text(arm) for arm in arms} or {None: "the working tree"}

    def expected(self, stored: Plan) -> Expected:
        """What the runs of `stored` are to be. Of cells that cannot run here, only their code."""
        here = {cell.id: cell for cell in self.plans.chosen.cells}
        merged = {cell.id for cell in self.plans.chosen.duplicates}
        cells = {cell.id: cell for cell in stored.cells if cell.id not in merged} | here
        return Expected(
            {
                (cell.id, arm): ExpectedRun(
                    cell.of(arm).config_hash if cell.id in here else None,
                    side.code_identity(cell.of(arm)),
                )
                for cell in cells.values()
                for arm, side in self.sides.items()
            },
            self.described,
        )


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
    if not arms and any(store.records(sweep=named)):
        return JudgedSweep(named)
    if find_sweep_file(Path(named)) is not None:
        request = SweepRequest(sweep=Path(named), arms=tuple(arms))
        plans = requested_plan(request, to_run=False)
        return _measured(store, Resolved(*prepared_sides(plans, store)))
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


def _measured(store: ResultsStore, requested: Resolved) -> JudgedSweep:
    """The sweep of the results folder that measured what is asked for.

    Raises:
        NothingMeasuredError: the file was never run with arms of these names.
        NotComparableError: it was, when an arm had other code.
    """
    plans = requested.plans
    found = [
        Plan.from_document(store.read_plan(name))
        for name in sorted(
            {*store.sweeps_called(plans.asked_id), *store.sweeps_of_arms(plans.asked_id)}
        )
        if any(store.statuses(name))
    ]
    if not found:
        known = ", ".join(store.sweeps()) or "none"
        arms = " with " + " and ".join(arm.name for arm in plans.arms) if plans.arms else ""
        raise NothingMeasuredError(
            f"{plans.whole.source} was never measured{arms}: {store.root} holds {known}; run it"
        )
    own = sorted(found, key=lambda plan: plan.id != plans.whole.id)
    for stored in own:
        if not _differences(stored, requested):
            _remark_on_commits(stored, requested)
            return JudgedSweep(stored.id, requested.expected(stored))
    lines = [f"{plan.id} measured {_differences(plan, requested)[0]}" for plan in own[:3]]
    raise NotComparableError(
        f"what is asked for was not measured: {'; '.join(lines)}. {WHAT_TO_DO}"
    )


def _differences(stored: Plan, requested: Resolved) -> list[str]:
    """Arms of `stored` whose code is not what is asked for, each with both identities."""
    found = []
    for arm in stored.arms:
        if arm.name not in requested.sides:
            found.append(f"arm {arm.name}, which is not asked for")
            continue
        for cell in stored.cells:
            now = requested.sides[arm.name].code_identity(cell.of(arm.name))
            then = arm.codes.get(cell.id, now)
            if then != now:
                found.append(
                    f"{arm.name} at {commit_text(arm)} (code {then}), asked for is"
                    f" {requested.described[arm.name]} (code {now})"
                )
                break
    return found


def _remark_on_commits(stored: Plan, requested: Resolved) -> None:
    now = {arm.name: arm for arm in requested.plans.whole.arms}
    for arm in stored.arms:
        if arm.commit != now[arm.name].commit:
            console.note(
                f"arm {arm.name} was measured at {commit_text(arm)}, whose code is that of"
                f" {commit_text(now[arm.name])}"
            )
