"""From the arms that were asked for to a plan that names them and the sides that run them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bench.cli import console
from bench.cli.planning import RequestedPlan
from bench.launch import code_identity, launch
from bench.launch.arm.prepare import PreparedArm, prepare_arms
from bench.launch.local.launcher import LocalLauncher
from bench.launch.protocol import Launcher
from bench.store import ResultsStore
from sweeps.execution import Side, Sides
from sweeps.plan import Plan, PlannedArm

ARMS_FOLDER = "arms"


def prepared_sides(plans: RequestedPlan, store: ResultsStore) -> tuple[RequestedPlan, Sides]:
    """The plans with their arms, and how each arm's runs are started.

    Raises:
        UsageError: an arm cannot be what it is asked to be; nothing has been run.
    """
    launcher = plans.hosts or LocalLauncher()
    if not plans.arms:
        return plans, {None: Side(partial(launch, launcher=launcher), code_identity)}
    cells = {
        arm.name: {cell.id: cell.of(arm.name) for cell in plans.chosen.cells} for arm in plans.arms
    }
    prepared = prepare_arms(plans.arms, cells, store.root / ARMS_FOLDER)
    arms = tuple(_planned(arm, plans.whole) for arm in prepared)
    for arm in arms:
        console.note(arm_line(arm))
    _remark_on_equal_arms(arms)
    sides: Sides = {arm.name: _side(arm, launcher) for arm in prepared}
    with_arms = replace(
        plans,
        whole=replace(plans.whole, arms=arms),
        chosen=replace(plans.chosen, arms=arms),
    )
    return with_arms, sides


def arm_line(arm: PlannedArm) -> str:
    """One arm for people."""
    commit = f", commit {arm.commit[:12]}" if arm.commit else ""
    changed = f" with uncommitted changes ({arm.dirty_hash})" if arm.dirty_hash else ""
    return f"arm {arm.name}: {arm.description}{commit}{changed}, torch {arm.torch}"


def _planned(arm: PreparedArm, plan: Plan) -> PlannedArm:
    torch, python = arm.code.versions()
    pinned = arm.code.pinned
    installed = pinned.distributions if pinned is not None else {}
    return PlannedArm(
        name=arm.name,
        description=arm.description,
        commit=arm.commit,
        dirty_hash=arm.dirty_hash,
        torch=torch,
        python=python,
        packages={name: str(found["version"]) for name, found in sorted(installed.items())},
        codes={cell.id: code_identity(cell.of(arm.name), code=arm.code) for cell in plan.cells},
    )


def _side(arm: PreparedArm, launcher: Launcher) -> Side:
    code, start = arm.code, partial(launch, launcher=launcher)
    return Side(partial(start, code=code), partial(code_identity, code=code), code)


def _remark_on_equal_arms(arms: tuple[PlannedArm, ...]) -> None:
    first, *others = arms
    if others and first.codes and all(arm.codes == first.codes for arm in others):
        console.note("all arms run the same code: differences between them are noise (A/A)")
