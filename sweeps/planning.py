"""From a sweep file to what it would run on one machine: expand, prune with reasons, merge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

from bench.errors import ConfigError, UnsupportedError
from bench.launch.arms import ArmRequest
from bench.plan import DuplicateCell, Plan, PlannedCell, PrunedCell
from bench.resolve import resolve
from bench.resolve.machine import Machine
from bench.spec import ResolvedRun
from sweeps.definition import SweepDefinition
from sweeps.document import Problem, SweepFileError
from sweeps.matrix import ARM, MatrixCell, expand, pinned
from sweeps.selection import variant_name
from sweeps.settings import Settings, full_path, known_paths, run_spec, short_path

MAX_SHOWN_PROBLEMS = 20


def sweep_cells(definition: SweepDefinition, fixed: Settings) -> tuple[MatrixCell, ...]:
    """The cells of a sweep with the settings that the command line fixed."""
    return expand(pinned(definition.matrix, fixed))


def _cells_by_arm(
    definition: SweepDefinition, fixed: Settings, arms: Sequence[ArmRequest]
) -> dict[str, tuple[MatrixCell, ...]]:
    """The cells as each arm runs them, under "" where all arms run the same."""
    matrix = pinned(definition.matrix, fixed)
    if not any(arm.settings for arm in arms):
        return {"": expand(matrix)}
    return {
        arm.name: expand(
            matrix, arm.name, {k: v for k, v in arm.settings.items() if k not in fixed}
        )
        for arm in arms
    }


def make_plan(
    definition: SweepDefinition,
    machine: Machine,
    *,
    fixed: Settings | None = None,
    repeat: int | None = None,
    arms: Sequence[ArmRequest] = (),
) -> Plan:
    """Expand, prune and merge.

    Args:
        definition: the checked sweep file.
        machine: where it would run.
        fixed: settings of `--set`, by full path.
        repeat: runs of each cell, instead of the file's number.
        arms: what runs the cells; a cell that one of them cannot run is pruned for all.

    Raises:
        SweepFileError: a cell that is wrong on every machine.
    """
    settings = dict(fixed or {})
    planned: dict[tuple[str, ...], PlannedCell] = {}
    pruned: list[PrunedCell] = []
    duplicates: list[DuplicateCell] = []
    sides = {
        arm: _resolved_cells(cells, definition, machine, settings)
        for arm, cells in _cells_by_arm(definition, settings, arms).items()
    }
    for items in zip(*sides.values(), strict=True):
        outcome = _as_planned(dict(zip(sides, items, strict=True)), repeat or definition.repeat)
        if isinstance(outcome, PrunedCell):
            pruned.append(outcome)
            continue
        hashes = tuple(run.config_hash for run in (outcome.resolved, *outcome.by_arm.values()))
        if hashes in planned:
            first = planned[hashes].id
            reason = f"resolves to the same run as {first} (config {hashes[0]})"
            duplicates.append(DuplicateCell(outcome.id, outcome.labels, first, reason))
            continue
        planned[hashes] = outcome
    return Plan(
        id=variant_name(definition.name, settings),
        name=definition.name,
        description=definition.description,
        source=PurePath(definition.source).name,
        cells=tuple(planned.values()),
        pruned=tuple(pruned),
        duplicates=tuple(duplicates),
        fixed={short_path(path): value for path, value in settings.items()},
    )


def _as_planned(
    items: Mapping[str, tuple[MatrixCell, ResolvedRun | UnsupportedError]], repeats: int
) -> PlannedCell | PrunedCell:
    """One cell, judged for every arm (under "" for all of them)."""
    by_arm: dict[str, ResolvedRun] = {}
    for arm, (cell, outcome) in items.items():
        labels = {name: label for name, label in cell.labels.items() if name != ARM}
        if isinstance(outcome, UnsupportedError):
            reason = f"arm {arm}: {outcome.reason}" if arm else outcome.reason
            return PrunedCell(cell.id, labels, outcome.rule, reason)
        by_arm[arm] = outcome
    resolved = next(iter(by_arm.values()))
    return PlannedCell(cell.id, labels, resolved, repeats, {k: v for k, v in by_arm.items() if k})


def _resolved_cells(
    cells: Iterable[MatrixCell], definition: SweepDefinition, machine: Machine, fixed: Settings
) -> list[tuple[MatrixCell, ResolvedRun | UnsupportedError]]:
    """Every cell, in order, and its run or why this machine cannot run it.

    Raises:
        SweepFileError: cells that are wrong on every machine, each with the line to change.
    """
    outcomes: list[tuple[MatrixCell, ResolvedRun | UnsupportedError]] = []
    problems: dict[Problem, list[str]] = {}
    for cell in cells:
        try:
            outcomes.append((cell, resolve(cell.spec, machine)))
        except UnsupportedError as error:
            outcomes.append((cell, error.with_traceback(None)))
        except ConfigError as error:
            line = _line_at_fault(cell, error, definition.base_lines, machine, fixed)
            problems.setdefault(Problem(line, str(error)), []).append(cell.id)
    if problems:
        raise SweepFileError(definition.source, _with_cells(problems))
    return outcomes


def _with_cells(problems: Mapping[Problem, list[str]]) -> list[Problem]:
    """One problem per line and message, naming the first cells that have it."""
    result = []
    for problem, ids in list(problems.items())[:MAX_SHOWN_PROBLEMS]:
        more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
        result.append(Problem(problem.line, f"{problem.message} (cell {ids[0]}{more})"))
    hidden = len(problems) - len(result)
    if hidden:
        result.append(Problem(None, f"{hidden} more problems"))
    return result


def _line_at_fault(
    cell: MatrixCell,
    error: ConfigError,
    base_lines: Mapping[str, int],
    machine: Machine,
    fixed: Settings,
) -> int | None:
    """The line whose value makes the cell wrong; None if the command line does.

    First the setting that the message names (`train.global_batch: ...`), where the file sets it.
    Else the first axis value that is wrong with `base` alone; else the cell's last one.
    """
    named = _named_setting(str(error))
    if named is not None:
        if named in fixed:
            return None
        for origin in reversed(cell.origins):
            if named in origin.settings:
                return origin.line
        if named in base_lines and not cell.origins:
            return base_lines[named]
    own = {path for origin in cell.origins for path in origin.settings}
    base = {path: value for path, value in cell.settings.items() if path not in own}
    if _is_wrong(base, machine):
        return base_lines.get(named or "", min(base_lines.values(), default=1))
    for origin in cell.origins:
        if _is_wrong({**base, **origin.settings}, machine):
            return origin.line
    return cell.origins[-1].line if cell.origins else 1


def _named_setting(message: str) -> str | None:
    path = message.partition(":")[0]
    if path in known_paths():
        return path
    if path == "launch.env":
        words = message.partition(":")[2].replace("'", " ").split()
        return full_path(f"env.{words[0]}") if words and words[0].isidentifier() else None
    return None


def _is_wrong(settings: Settings, machine: Machine) -> bool:
    try:
        resolve(run_spec(settings), machine)
    except ConfigError:
        return True
    except UnsupportedError:
        pass
    return False
