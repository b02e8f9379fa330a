"""A sweep file with what a command line says of it: its plan, its arms, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from bench.errors import UsageError
from bench.launch.arms import ArmRequest, prepare_arms
from bench.launch.code import RankCode, code_identity
from bench.launch.local.launcher import LocalLauncher
from bench.launch.protocol import Launcher
from bench.launch.run import launch
from bench.plan import Plan, PlannedArm, identity
from bench.resolve.machine import Machine
from bench.store import ResultsStore
from sweeps import shipped_sweeps
from sweeps.arms import parse_arm_options
from sweeps.definition import load_sweep
from sweeps.planning import make_plan, sweep_cells
from sweeps.runner import Side, Sides
from sweeps.selection import parse_assignments, selected
from sweeps.suggest import did_you_mean

ARMS_FOLDER = "arms"


class Cells(NamedTuple):
    """Texts of `--set`, `--only` and `--skip`."""

    assignments: Sequence[str] = ()
    only: Sequence[str] = ()
    skip: Sequence[str] = ()


@dataclass(frozen=True)
class SelectedSweep:
    """The plan of a sweep file, and the cells that were selected of it.

    kept: their ids. arms: as they were requested. named_by_code: once prepared, the id of the plan
    ends with what the arms are; `planned_id` is what it begins with. sides: how the runs of each
    arm are started; empty until `prepared`, which also has the plan name its arms.
    """

    full_plan: Plan
    kept: tuple[str, ...]
    arms: tuple[ArmRequest, ...] = ()
    named_by_code: bool = False
    planned_id: str = ""
    sides: Sides = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        named: Path,
        machine: Machine,
        cells: Cells | None = None,
        *,
        arms: Iterable[str] = (),
        repeat: int | None = None,
        interleave: bool = False,
        to_run: bool = True,
    ) -> SelectedSweep:
        """Read the sweep file `named` and plan it for `machine`.

        arms: texts of `--arm`. to_run: False to look at what was run.

        Raises:
            UsageError: the file, an option or a cell is wrong.
        """
        definition = load_sweep(sweep_file(named))
        requested = parse_arm_options(arms)
        all_arms = requested or definition.arms
        interleaved = interleave or definition.interleave
        if interleaved and not all_arms:
            raise UsageError(
                "interleaved blocks and budgets need arms, and there are none; add them, as in"
                " --arm base=main --arm head=."
            )
        cells = cells or Cells()
        fixed = parse_assignments(cells.assignments)
        kept = selected(cells.only, cells.skip, sweep_cells(definition, fixed))
        if to_run and any(arm.settings for arm in all_arms) and not interleaved:
            raise UsageError(
                "arms that differ in their settings are compared block by block; add `interleave:"
                " true` to the file, or --interleave"
            )
        plan = make_plan(definition, machine, fixed=fixed, repeat=repeat, arms=all_arms)
        if requested:
            # Runs of the plain sweep and of its arms are kept apart, and so are their plans.
            plan = replace(plan, id=f"{plan.id}-{'-vs-'.join(arm.name for arm in all_arms)}")
        # Arms of a file that all run this checkout are known by the file, as any sweep is.
        named_by_code = bool(requested) or any(arm.has_own_code for arm in all_arms)
        return cls(replace(plan, interleaved=interleaved), kept, all_arms, named_by_code, plan.id)

    @cached_property
    def chosen(self) -> Plan:
        """The plan of the cells that were selected."""
        return self.full_plan.selected(self.kept)

    @property
    def id(self) -> str:
        """Of the plan, and so of the sweep in a results folder."""
        return self.full_plan.id

    def with_arms(self, name: str, arms: tuple[ArmRequest, ...]) -> SelectedSweep:
        """The same cells as a sweep of this name, run by these arms, in blocks if several."""
        full_plan = replace(self.full_plan, id=name, interleaved=len(arms) > 1)
        return replace(self, full_plan=full_plan, arms=arms)

    def prepared(
        self,
        store: ResultsStore,
        note: Callable[[str], None],
        launcher: Launcher | None = None,
    ) -> SelectedSweep:
        """With its arms as they are now, in the plan and as sides; `note` gets a line of each.

        Raises:
            UsageError: an arm cannot be what it is to be; nothing has been run.
        """
        start = partial(launch, launcher=launcher or LocalLauncher())
        if not self.arms:
            return replace(self, sides={None: Side(start, code_identity)})
        cells = {arm.name: {c.id: c.of(arm.name) for c in self.chosen.cells} for arm in self.arms}
        prepared = prepare_arms(self.arms, cells, store.root / ARMS_FOLDER)
        arms = tuple(
            _planned(code, request, self.full_plan)
            for code, request in zip(prepared, self.arms, strict=True)
        )
        for arm in arms:
            note(f"arm {arm.name}: {arm.description}, {commit_text(arm)}, torch {arm.torch}")
        kinds = [(arm.codes, arm.settings) for arm in arms]
        if len(arms) > 1 and arms[0].codes and all(kind == kinds[0] for kind in kinds):
            note("all arms run the same code: differences between them are noise (A/A)")
        name = f"{self.id}-{identity(arms)}" if self.named_by_code else self.id
        by_arm: Sides = {
            request.name: Side(partial(start, code=code), partial(code_identity, code=code))
            for code, request in zip(prepared, self.arms, strict=True)
        }
        return replace(self, full_plan=replace(self.full_plan, arms=arms, id=name), sides=by_arm)

    def plans_in(self, store: ResultsStore) -> list[Plan]:
        """Plans of this sweep with runs, by whatever code; once prepared, its own first."""
        names = {*store.sweeps_called(self.planned_id), *store.sweeps_of_arms(self.planned_id)}
        plans = [
            Plan.from_document(store.read_plan(name))
            for name in sorted(names)
            if any(store.statuses(name))
        ]
        return sorted(plans, key=lambda plan: plan.id != self.id)

    def difference_of(self, stored: Plan) -> str | None:
        """An arm of `stored` whose code is not what it is now, with both identities."""
        arms_now = {arm.name: arm for arm in self.full_plan.arms}
        for arm in stored.arms:
            if arm.name not in self.sides:
                return f"arm {arm.name}, which is not requested"
            for cell in stored.cells:
                now = self.sides[arm.name].code_identity(cell.of(arm.name))
                then = arm.codes.get(cell.id, now)
                if then != now:
                    return (
                        f"{arm.name} at {commit_text(arm)} (code {then}), requested is"
                        f" {commit_text(arms_now[arm.name])} (code {now})"
                    )
        return None


def _planned(code: RankCode, request: ArmRequest, plan: Plan) -> PlannedArm:
    torch, python = code.versions()
    pinned = code.pinned
    installed = {} if pinned is None else pinned.distributions
    return PlannedArm(
        name=request.name,
        description=request.described(),
        commit=None if pinned is None else pinned.commit,
        dirty_hash=None if pinned is None else pinned.dirty_hash,
        torch=torch,
        python=python,
        packages={name: str(facts["version"]) for name, facts in sorted(installed.items())},
        codes={cell.id: code_identity(cell.of(request.name), code=code) for cell in plan.cells},
        settings=request.settings,
    )


def commit_text(arm: PlannedArm) -> str:
    """The commit of an arm for people, and what was changed in it."""
    commit = f"commit {arm.commit[:12]}" if arm.commit else "no commit"
    return commit + (f" with uncommitted changes ({arm.dirty_hash})" if arm.dirty_hash else "")


def sweep_file(named: Path) -> Path:
    """The file itself, or the definition that comes with the tool under this name.

    Raises:
        UsageError: neither; lists what there is.
    """
    file = find_sweep_file(named)
    if file is not None:
        return file
    stem = named.name.removesuffix(".yaml")
    files = [file.stem for file in named.parent.glob("[!.]*.yaml")]
    shipped = sorted(shipped_sweeps()) if len(named.parts) == 1 else []
    what = "no such file"
    hint = did_you_mean(stem, files, ".yaml") or did_you_mean(stem, shipped)
    if shipped and not hint:
        what = f"no file of that name, and these sweeps come with the tool: {', '.join(shipped)}"
    raise UsageError(f"sweep {named}: {what}{hint}")


def find_sweep_file(named: Path) -> Path | None:
    """As `sweep_file`, but None where there is neither."""
    try:
        exists = named.exists()
    except OSError as error:
        raise UsageError(f"cannot look for the sweep {named}: {error.strerror}") from error
    if exists:
        return named
    return shipped_sweeps().get(named.name.removesuffix(".yaml")) if len(named.parts) == 1 else None
