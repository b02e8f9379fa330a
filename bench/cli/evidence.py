"""`report` and `compare`: the command line in front of the package `reports`."""

from __future__ import annotations

from pathlib import Path

from reports.build import ReportPaths, write_report

from bench.cli import console, exit_codes
from bench.errors import UsageError
from bench.store import ResultsStore


def write_reports(results: Path, sweeps: list[str], out: Path | None, *, as_json: bool) -> int:
    """Write one report on `sweeps` (all of the folder if empty) and print where it is."""
    store = ResultsStore.open(results, create=False)
    names = sweeps or store.sweeps()
    if not names:
        raise UsageError(f"{results} holds no sweep yet; `mfsdp-bench run` makes one")
    paths = write_report_files(store, names, out or default_report_folder(store, names))
    if as_json:
        console.data_json({"html": str(paths.html), "markdown": str(paths.markdown)})
    else:
        console.data(str(paths.html))
    return exit_codes.OK


def default_report_folder(store: ResultsStore, sweeps: list[str]) -> Path:
    """`RESULTS/reports/<sweep>`, or `<sweep>-and-<n>-more`."""
    more = f"-and-{len(sweeps) - 1}-more" if len(sweeps) > 1 else ""
    return store.root / "reports" / f"{sweeps[0]}{more}"


def write_report_files(store: ResultsStore, sweeps: list[str], out: Path) -> ReportPaths:
    """Write the report on `sweeps` into `out`."""
    return write_report(store, sweeps, out)
