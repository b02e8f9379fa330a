"""`report`: where a report goes, and the command line in front of `reports.build`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from bench.cli import console, exit_codes
from bench.cli.console import Answer
from bench.cli.verbs.read import ReportRequest
from bench.errors import UsageError
from bench.store import ResultsStore
from reports.build import ReportPaths, write_report
from reports.posts.gathered import gather
from reports.posts.pull_request import pull_request


def report(request: ReportRequest) -> Answer:
    """One report on sweeps (all of the folder if none is named), or a text to paste."""
    store = ResultsStore.open(request.results, create=False)
    return _post(store, request) if request.form != "html" else _report(store, request)


def _post(store: ResultsStore, request: ReportRequest) -> Answer:
    """The block of a pull request; written where a folder is named.

    Raises:
        UsageError: an unknown name.
        NothingMeasuredError: no run has finished, and none was imported.
    """
    text = pull_request(gather(store, request.sweeps))
    if request.out is None:
        return Answer(lambda: {"markdown": text}, lambda: text)
    path = request.out / "pr.md"
    console.write_file(path, text)
    return Answer(lambda: {"markdown": text}, lambda: str(path))


def _report(store: ResultsStore, request: ReportRequest) -> Answer:
    """Written also where nothing was measured, with the reasons; the exit code says so."""
    names = [one for name in request.sweeps for one in store.sweeps_called(name) or [name]]
    names = names or store.sweeps()
    if not names and not store.imports.ids():
        raise UsageError(f"{request.results} holds no sweep yet; `mfsdp-bench run` makes one")
    out = request.out or default_report_folder(store, names)
    paths = write_report(store, names, out, reference=request.reference)
    answer = Answer(lambda: asdict(paths), lambda: str(paths.html))
    if paths.measured_cells or (not paths.planned_cells and paths.imported_runs):
        return answer
    remark = f"nothing was measured in any of {paths.planned_cells} cells; the report says why"
    return replace(answer, code=exit_codes.NOTHING_MEASURED, remarks=(remark,))


def default_report_folder(store: ResultsStore, sweeps: list[str]) -> Path:
    """`RESULTS/reports/<sweep>`, `<sweep>-and-<n>-more`, or `imported` where there is no sweep."""
    if not sweeps:
        return store.root / "reports" / "imported"
    more = f"-and-{len(sweeps) - 1}-more" if len(sweeps) > 1 else ""
    return store.root / "reports" / f"{sweeps[0]}{more}"


def write_sweep_report(store: ResultsStore, sweep: str) -> ReportPaths:
    """The report on one sweep, in its usual place."""
    return write_report(store, [sweep], default_report_folder(store, [sweep]))
