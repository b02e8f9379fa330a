"""`import`: the command line in front of `bench.importers`."""

from __future__ import annotations

from pathlib import Path

from bench.cli import console, exit_codes
from bench.errors import UsageError
from bench.importers.table import read_log
from bench.store import ResultsStore
from bench.store.imports import ImportedRun
from reports.comparisons.imported import absences, of_import, side_by_side, to_data
from reports.renderers import terminal


def import_log(
    results: Path,
    log: Path | None,
    *,
    form: str | None,
    name: str | None,
    facts: list[str],
    as_json: bool,
) -> int:
    """Keep a log with `facts` (FIELD=VALUE), or list what was kept.

    Raises:
        UsageError: a log that cannot be read, a name that is taken, or a fact that is none.
        NothingMeasuredError: no training step is found in the log.
    """
    if log is None:
        if name or form or facts:
            raise UsageError("--from, --name and --set say what a log is; name the log")
        kept = list(ResultsStore.open(results, create=False).imports.all())
        return _show(kept, results, as_json=as_json)
    workload, provenance, steps = read_log(log, form, dict(map(_fact, facts)))
    store = ResultsStore.open(results, create=True)
    name = name or log.name.removesuffix(log.suffix)
    if name in store.sweeps():
        raise UsageError(f"{name} is the name of a sweep in {results}; choose one by --name")
    run = store.imports.write(name, workload, provenance, steps)
    return _show([run], results, as_json=as_json)


def _fact(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set: expected FIELD=VALUE, found {text!r}")
    return name.strip(), value.strip()


def _show(runs: list[ImportedRun], results: Path, *, as_json: bool) -> int:
    shown = [of_import(run) for run in runs]
    if as_json:
        console.data_json({"imports": to_data(shown)})
        return exit_codes.OK
    if not runs:
        console.data(f"{results} holds no imported run")
        return exit_codes.OK
    console.data(terminal.table(side_by_side(shown)).rstrip("\n"))
    for name, missing in absences(shown):
        console.data(f"{name} does not say: {missing}")
    for run in runs:
        for remark in run.provenance.remarks:
            console.data(f"{run.id}: {remark}")
    return exit_codes.OK
