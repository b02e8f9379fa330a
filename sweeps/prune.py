"""Each cell against one machine: it can run, it cannot (and why), or the sweep file is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bench.errors import ConfigError, UnsupportedError
from bench.resolve import resolve
from bench.resolve.machine import Machine
from bench.spec import ResolvedRun
from sweeps.document import Problem, SweepFileError
from sweeps.matrix import MatrixCell
from sweeps.settings import Settings, full_path, known_paths, run_spec

MAX_SHOWN_PROBLEMS = 20


def judge(
    cells: Iterable[MatrixCell],
    machine: Machine,
    *,
    source: str,
    base_lines: Mapping[str, int],
    fixed: Settings,
) -> list[tuple[MatrixCell, ResolvedRun | UnsupportedError]]:
    """Every cell, in order, and its run or why this machine cannot run it.

    Args:
        cells: what the matrix expands to.
        machine: where they would run.
        source: the sweep file, for messages.
        base_lines: line of every setting of `base`.
        fixed: settings that the command line fixed with `--set`.

    Raises:
        SweepFileError: cells that are wrong on every machine, each with the line to change.
    """
    judged: list[tuple[MatrixCell, ResolvedRun | UnsupportedError]] = []
    problems: dict[Problem, list[str]] = {}
    for cell in cells:
        try:
            judged.append((cell, resolve(cell.spec, machine)))
        except UnsupportedError as error:
            judged.append((cell, error.with_traceback(None)))
        except ConfigError as error:
            line = _line_at_fault(cell, error, machine, base_lines, fixed)
            problems.setdefault(Problem(line, str(error)), []).append(cell.id)
    if problems:
        raise SweepFileError(source, _with_cells(problems))
    return judged


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
    machine: Machine,
    base_lines: Mapping[str, int],
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
        return False
    return False
