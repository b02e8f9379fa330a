"""`import`: the command line in front of `bench.importers`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.cli import console, exit_codes
from bench.errors import UsageError
from bench.importers.table import read_log
from bench.store import ResultsStore
from bench.store.imports import ImportedRun
from reports.comparisons.imported import absences, of_import, side_by_side, to_data
from reports.renderers import terminal


@dataclass(frozen=True)
class Importing:
    """What `import` was asked for. facts: FIELD=VALUE."""

    results: Path
    log: Path | None
    form: str | None
    name: str | None
    facts: list[str]
    as_json: bool


def import_log(asked: Importing) -> int:
    """Keep a log, or list what was kept.

    Raises:
        UsageError: a log that cannot be read, a name that is taken, or a fact that is none.
        NothingMeasuredError: no training step is found in the log.
    """
    if asked.log is None:
        if asked.name or asked.form or asked.facts:
            raise UsageError("--from, --name and --set say what a log is; name the log")
        store = ResultsStore.open(asked.results, create=False)
        return _show(list(store.imports.all()), asked)
    facts = dict(_fact(text) for text in asked.facts)
    workload, provenance, steps = read_log(asked.log, asked.form, facts)
    store = ResultsStore.open(asked.results, create=True)
    name = asked.name or asked.log.name.removesuffix(asked.log.suffix)
    if name in store.sweeps():
        raise UsageError(f"{name} is the name of a sweep in {asked.results}; choose one by --name")
    return _show([store.imports.write(name, workload, provenance, steps)], asked)


def _fact(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set: expected FIELD=VALUE, found {text!r}")
    return name.strip(), value.strip()


def _show(runs: list[ImportedRun], asked: Importing) -> int:
    shown = [of_import(run) for run in runs]
    if asked.as_json:
        console.data_json({"imports": to_data(shown)})
        return exit_codes.OK
    if not runs:
        console.data(f"{asked.results} holds no imported run")
        return exit_codes.OK
    console.data(terminal.table(side_by_side(shown)).rstrip("\n"))
    for name, missing in absences(shown):
        console.data(f"{name} does not say: {missing}")
    for run in runs:
        for remark in run.provenance.remarks:
            console.data(f"{run.id}: {remark}")
    return exit_codes.OK
