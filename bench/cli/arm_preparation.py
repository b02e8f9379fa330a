"""From the arms that were asked for to a plan that names them and the sides that run them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bench.cli import console
from bench.cli.planning import RequestedPlan
from bench.launch.arm.prepare import PreparedArm, prepare_arms
from bench.launch.code import code_identity
from bench.launch.protocol import Launcher
from bench.launch.run import launch
from bench.store import ResultsStore
from sweeps.execution import Side, Sides
from sweeps.plan import Plan, PlannedArm, identity
from sweeps.settings import Settings

ARMS_FOLDER = "arms"


def prepared_sides(plans: RequestedPlan, store: ResultsStore) -> tuple[RequestedPlan, Sides]:
    """The plans with their arms, under the id that these give, and how each arm's runs are started.

    Raises:
        UsageError: an arm cannot be what it is asked to be; nothing has been run.
    """
    launcher = plans.launcher.start(plans.settings)
    if not plans.arms:
        return plans, {None: Side(partial(launch, launcher=launcher), code_identity)}
    cells = {
        arm.name: {cell.id: cell.of(arm.name) for cell in plans.chosen.cells} for arm in plans.arms
    }
    prepared = prepare_arms(plans.arms, cells, store.root / ARMS_FOLDER)
    settings = {arm.name: arm.settings for arm in plans.arms}
    arms = tuple(_planned(arm, settings[arm.name], plans.whole) for arm in prepared)
    for arm in arms:
        console.note(arm_line(arm))
    _remark_on_equal_arms(arms)
    sides: Sides = {arm.name: _side(arm, launcher) for arm in prepared}
    named = f"{plans.whole.id}-{identity(arms)}" if plans.named_by_code else plans.whole.id
    with_arms = replace(
        plans,
        whole=replace(plans.whole, arms=arms, id=named),
        chosen=replace(plans.chosen, arms=arms, id=named),
    )
    return with_arms, sides


def arm_line(arm: PlannedArm) -> str:
    """One arm for people."""
    return f"arm {arm.name}: {arm.description}, {commit_text(arm)}, torch {arm.torch}"


def commit_text(arm: PlannedArm) -> str:
    """The commit of an arm for people, and what was changed in it."""
    commit = f"commit {arm.commit[:12]}" if arm.commit else "no commit"
    return commit + (f" with uncommitted changes ({arm.dirty_hash})" if arm.dirty_hash else "")


def _planned(arm: PreparedArm, settings: Settings, plan: Plan) -> PlannedArm:
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
        settings=settings,
    )


def _side(arm: PreparedArm, launcher: Launcher) -> Side:
    code, start = arm.code, partial(launch, launcher=launcher)
    return Side(partial(start, code=code), partial(code_identity, code=code), code)


def _remark_on_equal_arms(arms: tuple[PlannedArm, ...]) -> None:
    first, *others = arms
    if others and first.codes and all(arm.codes == first.codes for arm in others):
        console.note("all arms run the same code: differences between them are noise (A/A)")
