"""`lint`: the command line in front of `reports.lint`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.cli import console, exit_codes
from bench.cli.console import Answer
from bench.cli.importing import STANDARD_INPUT, blocks
from bench.cli.verbs.read import LintRequest
from bench.errors import NothingMeasuredError, UsageError
from bench.importers.table import read_text
from bench.resolve.presets import PRESETS
from bench.store import ResultsStore
from reports.gates.pairing import arms_of_sweep
from reports.lint import presentation
from reports.lint.check import Linted, lint, lint_runs, lint_text, silence
from reports.lint.rules import Subject
from reports.nccl.source import LogSource, find_sources
from reports.views.cells import Cell
from reports.views.sweep_view import load_side, load_sweeps

_FORMATS: dict[str, Callable[[Linted], str]] = {
    "table": presentation.to_terminal,
    "md": presentation.to_markdown,
    "github": lambda linted: "\n".join(presentation.to_github(linted)),
}


def show_lint(asked: LintRequest) -> Answer:
    """What the evidence does not support; 1 where a finding is open.

    Raises:
        UsageError: an unknown rule, a file that cannot be read, or no such run.
    """
    silences = [silence(text) for text in asked.ignore]
    linted = lint(_subjects(asked.results, asked.what), silences)
    return Answer(
        lambda: presentation.to_data(linted),
        lambda: _FORMATS[asked.form](linted),
        exit_codes.REQUIREMENT_NOT_MET if linted.open else exit_codes.OK,
    )


def _subjects(results: Path, what: Sequence[str]) -> list[Subject]:
    """Every file or folder is texts; everything else names runs, which are looked at together."""
    texts = [one for one in what if one == "-" or Path(one).exists()]
    named = [one for one in what if one not in texts]
    found: list[Subject] = []
    sources, remarks = find_sources(texts) if texts else ([], [])
    for remark in remarks:
        console.note(remark)
    found += (_of_text(source) for source in sources)
    singles = [subject for subject in found if len(subject.runs) == 1]
    if len(singles) > 1:
        # Logs of one run each: they are there to be compared.
        rest = [subject for subject in found if len(subject.runs) != 1]
        found = [*rest, Subject(tuple(one.runs[0] for one in singles), (), PRESETS)]
    if named:
        store = ResultsStore.open(results, create=False)
        known = store.imports.ids()
        imports = [store.imports.read(one) for one in named if one in known]
        cells = {one: _cells(store, one) for one in named if one not in known}
        _refuse_twice(named, cells)
        finished = [cell for found in cells.values() for cell in found if cell.finished]
        found.append(lint_runs(imports, finished, PRESETS))
    return found


def _cells(store: ResultsStore, name: str) -> list[Cell]:
    """The cells of a sweep, a cell or a run; what a sweep lacks is said.

    Raises:
        UsageError: no such name; or a sweep whose plan is lost, and with it which arm is the base.
    """
    if not any(store.statuses(name)):
        return load_side(store, name)
    (view,) = load_sweeps(store, [name])
    for problem in view.problems:
        console.note(f"warning: {problem}")
    if len(view.arms) > 1:
        arms_of_sweep(store, name, None, None)
    return list(view.cells)


def _refuse_twice(named: Sequence[str], cells: Mapping[str, Sequence[Cell]]) -> None:
    """Raise where a run would be compared with itself."""
    seen: dict[str, str] = {}
    for name in named:
        runs = [run.record.run_id for cell in cells.get(name, ()) for run in cell.runs]
        for run in {name, *runs}:
            if run in seen:
                raise UsageError(
                    f"{seen[run]} and {name} name the same run, which would be compared with"
                    " itself; name each once"
                )
        seen |= dict.fromkeys((name, *runs), name)


def _of_text(source: LogSource) -> Subject:
    text = b"".join(blocks(source))
    shown = str(source.path or STANDARD_INPUT)
    try:
        read = read_text(shown, [text], None, {})
    except NothingMeasuredError:
        console.note(f"{shown} holds no run: there is nothing to look at")
        return Subject(())
    runs = read if len(read) > 1 else [replace(read[0], id=Path(shown).stem)]
    return lint_text(runs, text.decode(errors="replace").split("\n"), PRESETS)
