"""A sweep file as a command line asks for it: its plan, its arms, and what starts its runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from pydantic import BaseModel

from bench.cli import console
from bench.cli.completion import shipped_sweeps
from bench.cli.launchers import (
    LAUNCHERS,
    LauncherKind,
    NoSettings,
    launcher_kind,
    launcher_settings,
)
from bench.cli.options import LOCAL, MachineRequest, SweepRequest
from bench.errors import UsageError
from bench.launch.arm.prepare import ArmRequest, PreparedArm, prepare_arms
from bench.launch.code import code_identity
from bench.launch.run import launch
from bench.plan import Plan, PlannedArm, identity
from bench.resolve.machine import Machine, described_machine
from bench.store import ResultsStore
from sweeps.arms import parse_arm_options
from sweeps.definition import load_sweep
from sweeps.planning import make_plan, sweep_cells
from sweeps.runner import Side, Sides
from sweeps.selection import parse_assignments, selected
from sweeps.suggest import did_you_mean

ARMS_FOLDER = "arms"


@dataclass(frozen=True)
class ChosenSweep:
    """The plan of a sweep file, and the cells that were selected of it.

    kept: their ids. arms: as they were asked for. named_by_code: once prepared, the id of the plan
    ends with what the arms are; `asked_id` is what it begins with. launcher, settings: what makes
    the runs, and its settings. machine: what it is planned for. sides: how the runs of each arm are
    started; empty until `prepared`, which also has the plan name its arms.
    """

    whole: Plan
    kept: tuple[str, ...]
    arms: tuple[ArmRequest, ...] = ()
    launcher: LauncherKind = LAUNCHERS[LOCAL]
    settings: BaseModel = field(default_factory=NoSettings)
    named_by_code: bool = False
    asked_id: str = ""
    machine: Machine | None = None
    sides: Sides = field(default_factory=dict)

    @cached_property
    def chosen(self) -> Plan:
        """The plan of the cells that were selected."""
        return self.whole.selected(self.kept)

    @property
    def id(self) -> str:
        """Of the plan, and so of the sweep in a results folder."""
        return self.whole.id

    def only(self, cells: Iterable[str]) -> ChosenSweep:
        """Other cells of the same plan."""
        return replace(self, kept=tuple(cells))

    def with_arms(self, name: str, arms: tuple[ArmRequest, ...]) -> ChosenSweep:
        """The same cells as a sweep of this name, run by these arms, in blocks if several."""
        whole = replace(self.whole, id=name, interleaved=len(arms) > 1)
        return replace(self, whole=whole, arms=arms)

    def prepared(self, store: ResultsStore) -> ChosenSweep:
        """With its arms as they are now, in the plan and as sides.

        Raises:
            UsageError: an arm cannot be what it is asked to be; nothing has been run.
        """
        start = partial(launch, launcher=self.launcher.start(self.settings))
        if not self.arms:
            return replace(self, sides={None: Side(start, code_identity)})
        cells = {arm.name: {c.id: c.of(arm.name) for c in self.chosen.cells} for arm in self.arms}
        prepared = prepare_arms(self.arms, cells, store.root / ARMS_FOLDER)
        arms = tuple(
            _planned(arm, asked, self.whole) for arm, asked in zip(prepared, self.arms, strict=True)
        )
        for arm in arms:
            console.note(
                f"arm {arm.name}: {arm.description}, {commit_text(arm)}, torch {arm.torch}"
            )
        first, *others = arms
        if others and first.codes and all(arm.codes == first.codes for arm in others):
            console.note("all arms run the same code: differences between them are noise (A/A)")
        name = f"{self.whole.id}-{identity(arms)}" if self.named_by_code else self.whole.id
        return replace(
            self,
            whole=replace(self.whole, arms=arms, id=name),
            sides={
                arm.name: Side(partial(start, code=arm.code), partial(code_identity, code=arm.code))
                for arm in prepared
            },
        )


def choose(
    request: SweepRequest, *, machine: Machine | None = None, to_run: bool = True
) -> ChosenSweep:
    """Read the sweep file and plan it.

    Args:
        request: the file, and what of it.
        machine: to plan for; None is where the launcher makes its runs.
        to_run: False to look at what was run.

    Raises:
        UsageError: the file, an option or a cell is wrong.
    """
    definition = load_sweep(sweep_file(request.sweep))
    arms = parse_arm_options(request.arms) or definition.arms
    interleave = request.interleave or definition.interleave
    if interleave and not arms:
        raise UsageError(
            "interleaved blocks and budgets need arms, and there are none; add them, as in"
            " --arm base=main --arm head=."
        )
    fixed = parse_assignments(request.cells.assignments)
    cells = sweep_cells(definition, fixed)
    kept = selected(request.cells.only, request.cells.skip, cells)
    if to_run and any(arm.settings for arm in arms) and not interleave:
        raise UsageError(
            "arms that differ in their settings are compared block by block; add `interleave: true`"
            " to the file, or --interleave"
        )
    launcher = launcher_kind(request.launcher.name)
    settings = launcher_settings(launcher, request.launcher.options)
    machine = machine or launcher.machine(settings)
    whole = make_plan(definition, machine, fixed=fixed, repeat=request.repeat, arms=arms)
    if request.arms:
        # Runs of the plain sweep and of its arms are kept apart, and so are their plans.
        whole = replace(whole, id=f"{whole.id}-{'-vs-'.join(arm.name for arm in arms)}")
    return ChosenSweep(
        replace(whole, interleaved=interleave),
        kept,
        arms,
        launcher,
        settings,
        # Arms of a file that all run this checkout are known by the file, as any sweep is.
        named_by_code=bool(request.arms) or any(arm.has_own_code for arm in arms),
        asked_id=whole.id,
        machine=machine,
    )


def machine_of(asked: MachineRequest) -> Machine | None:
    """What --device and --gpus describe, None without them.

    Raises:
        UsageError: one of them is missing, or such a machine cannot be.
    """
    if asked.device is None and asked.gpus is None:
        return None
    if asked.device is None or asked.gpus is None:
        raise UsageError("--device and --gpus describe a machine together: give both, or neither")
    return described_machine(asked.device, asked.gpus)


def sweep_file(named: Path) -> Path:
    """The file itself, or the definition that comes with the tool under this name.

    Raises:
        UsageError: neither; lists what there is.
    """
    found = find_sweep_file(named)
    if found is not None:
        return found
    files = [path.name for path in named.parent.glob("*.yaml")]
    shipped = sorted(shipped_sweeps()) if len(named.parts) == 1 else []
    what = "no such file"
    hint = did_you_mean(named.name, files) or did_you_mean(named.name, shipped)
    if shipped and not hint:
        what = f"no file of that name, and these sweeps come with the tool: {', '.join(shipped)}"
    raise UsageError(f"sweep {named}: {what}{hint}")


def find_sweep_file(named: Path) -> Path | None:
    """As `sweep_file`, but None where there is neither."""
    try:
        found = named.exists()
    except OSError as error:
        raise UsageError(f"cannot look for the sweep {named}: {error.strerror}") from error
    if found:
        return named
    return shipped_sweeps().get(named.name.removesuffix(".yaml")) if len(named.parts) == 1 else None


def pruned_text(plan: Plan) -> str:
    """Every pruned cell with its rule and reason."""
    rows = [(cell.id, cell.rule, cell.reason) for cell in plan.pruned]
    return console.columns(("pruned", "rule", "reason"), rows)


def commit_text(arm: PlannedArm) -> str:
    """The commit of an arm for people, and what was changed in it."""
    commit = f"commit {arm.commit[:12]}" if arm.commit else "no commit"
    return commit + (f" with uncommitted changes ({arm.dirty_hash})" if arm.dirty_hash else "")


def _planned(arm: PreparedArm, asked: ArmRequest, plan: Plan) -> PlannedArm:
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
        settings=asked.settings,
    )
