"""`report`: where a report goes, and the command line in front of `reports.build`."""

from __future__ import annotations

from pathlib import Path

from bench.cli import console, exit_codes
from bench.errors import UsageError
from bench.resolve.presets import PRESETS
from bench.store import ResultsStore
from reports.build import ReportPaths, write_report
from reports.posts.gathered import gather
from reports.posts.matrix import matrix
from reports.posts.pull_request import pull_request

POSTS = {"pr": pull_request, "matrix": matrix}


def write_post(
    results: Path, names: list[str], out: Path | None, form: str, *, as_json: bool
) -> int:
    """Print the block of a pull request or a matrix by axes, or write it into the folder `out`.

    Raises:
        UsageError: an unknown format or name.
        NothingMeasuredError: no run has finished, and none was imported.
    """
    if form not in POSTS:
        raise UsageError(f"--format: expected one of html, {', '.join(POSTS)}, found {form!r}")
    store = ResultsStore.open(results, create=False)
    text = POSTS[form](gather(store, names, PRESETS))
    if out is not None:
        console.write_file(out / f"{form}.md", text)
    if as_json:
        console.data_json({"markdown": text})
    else:
        console.data(text.rstrip("\n") if out is None else str(out / f"{form}.md"))
    return exit_codes.OK


def write_reports(
    results: Path, sweeps: list[str], out: Path | None, reference: str | None, *, as_json: bool
) -> int:
    """Write one report on `sweeps` (all of the folder if empty) and print where it is.

    A report in which nothing was measured is written all the same, with the reasons; the exit code
    says so.
    """
    store = ResultsStore.open(results, create=False)
    names = [one for name in sweeps for one in store.sweeps_called(name) or [name]]
    names = names or store.sweeps()
    if not names and not store.imports.ids():
        raise UsageError(f"{results} holds no sweep yet; `mfsdp-bench run` makes one")
    paths = write_report(
        store, names, out or default_report_folder(store, names), reference=reference
    )
    if as_json:
        console.data_json(
            {
                "html": str(paths.html),
                "markdown": str(paths.markdown),
                "measured_cells": paths.measured_cells,
                "planned_cells": paths.planned_cells,
                "imported_runs": paths.imported_runs,
            }
        )
    else:
        console.data(str(paths.html))
    return report_code(paths)


def report_code(paths: ReportPaths) -> int:
    """3 and a remark where no cell was measured, else 0."""
    if paths.measured_cells or (not paths.planned_cells and paths.imported_runs):
        return exit_codes.OK
    console.note(f"nothing was measured in any of {paths.planned_cells} cells; the report says why")
    return exit_codes.NOTHING_MEASURED


def default_report_folder(store: ResultsStore, sweeps: list[str]) -> Path:
    """`RESULTS/reports/<sweep>`, `<sweep>-and-<n>-more`, or `imported` where there is no sweep."""
    if not sweeps:
        return store.root / "reports" / "imported"
    more = f"-and-{len(sweeps) - 1}-more" if len(sweeps) > 1 else ""
    return store.root / "reports" / f"{sweeps[0]}{more}"


def write_sweep_report(store: ResultsStore, sweep: str) -> ReportPaths:
    """The report on one sweep, in its usual place."""
    return write_report(store, [sweep], default_report_folder(store, [sweep]))
