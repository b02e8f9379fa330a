"""What reports ask of the plan of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.plan import Plan
from bench.store import ResultsStore

NOT_RUN = "it was planned and has not run"

Codes = Mapping[tuple[str, str | None], str]
"""Cell and arm -> the code that its runs are to have measured."""


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


def not_run(plan: Plan, cell: str, runs: set[tuple[int, str | None]], arms: Sequence[str]) -> str:
    """The first planned run of a cell that has no record among `runs`; empty if all have."""
    repeats = next((one.repeats for one in plan.cells if one.id == cell), 0)
    for block in range(repeats):
        for arm in arms or (None,):
            if (block, arm) not in runs:
                name = f"block {block}: {arm}" if arm else f"repeat {block}"
                return f"{name}: {NOT_RUN}"
    return ""
