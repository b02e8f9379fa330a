"""Which sweep `gate` and `compare` judge.

A sweep is named by its id, or is what a file asks for. A file and its arms are resolved as `run`
resolves them, so that a refusal, a failure or a change since the last run never passes for a
verdict on the code that is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.cli import console
from bench.errors import NotComparableError, NothingMeasuredError, UsageError
from bench.launch.inputs import changed_inputs
from bench.plan import Plan
from bench.resolve.machine import Machine
from bench.store import ResultsStore
from reports.compare.sides import WHAT_TO_DO, ExpectedRun, JudgedSweep
from sweeps.selected_sweep import SelectedSweep, commit_text, find_sweep_file
from sweeps.suggest import did_you_mean


def judged_sweep(store: ResultsStore, named: str, arms: Sequence[str]) -> JudgedSweep:
    """The sweep that `named` (an id or a sweep file) and its arms mean.

    Raises:
        UsageError: neither, or an arm that cannot be.
        NothingMeasuredError: the file was never run with these arms.
        NotComparableError: it was, when an arm had other code.
    """
    if not arms and (any(store.records(sweep=named)) or named in store.imports.ids()):
        return JudgedSweep(named)
    if find_sweep_file(Path(named)) is not None:
        sweep = SelectedSweep.of(Path(named), Machine.detect(), arms=arms, to_run=False)
        return _measured(store, sweep.prepared(store, console.note))
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


def _measured(store: ResultsStore, sweep: SelectedSweep) -> JudgedSweep:
    """The sweep of the results folder that measured this file and these arms."""
    differences: list[str] = []
    for stored in sweep.plans_in(store):
        difference = sweep.difference_of(stored)
        if difference is None:
            now = {arm.name: arm for arm in sweep.full_plan.arms}
            for arm in stored.arms:
                if arm.commit != now[arm.name].commit:
                    console.note(
                        f"arm {arm.name} was measured at {commit_text(arm)}, whose code is that of"
                        f" {commit_text(now[arm.name])}"
                    )
            return as_it_is(sweep, stored)
        differences.append(f"{stored.id} measured {difference}")
    if differences:
        raise NotComparableError(
            f"what is requested was not measured: {'; '.join(differences[:3])}. {WHAT_TO_DO}"
        )
    known = ", ".join(store.sweeps()) or "none"
    arms = " with " + " and ".join(arm.name for arm in sweep.arms) if sweep.arms else ""
    raise NothingMeasuredError(
        f"{sweep.full_plan.source} was never measured{arms}: {store.root} holds {known}; run it"
    )


def as_it_is(sweep: SelectedSweep, stored: Plan) -> JudgedSweep:
    """What the runs of `stored` are to be now. Of cells that cannot run here, only their code.

    Args:
        sweep: prepared.
        stored: the plan that was run.
    """
    here = {cell.id: cell for cell in sweep.chosen.cells}
    merged = {cell.id for cell in sweep.chosen.duplicates}
    cells = {cell.id: cell for cell in stored.cells if cell.id not in merged} | here
    runs = {
        (cell.id, arm): ExpectedRun(
            cell.of(arm).config_hash if cell.id in here else None,
            side.code_identity(cell.of(arm)),
        )
        for cell in cells.values()
        for arm, side in sweep.sides.items()
    }
    described: dict[str | None, str] = {a.name: commit_text(a) for a in sweep.full_plan.arms}
    described = described or {None: "the working tree"}
    return JudgedSweep(stored.id, runs, described, changed_inputs)
