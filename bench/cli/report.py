"""`report`: where a report goes, and the command line in front of `reports.build`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bench.cli import console, exit_codes
from bench.cli.verb import Answer, ResultsOption, argument, option
from bench.errors import UsageError
from reports.renderers.document import Paragraph

if TYPE_CHECKING:
    from bench.store import ResultsStore
    from reports.build import ReportPaths


class SweepIds(ResultsOption):
    """Of verbs that read sweeps of a results folder."""

    sweeps: tuple[str, ...] = argument("SWEEP", "Sweep ids; all if left out.", ())


class ReportVerb(SweepIds, name="report"):
    """Write a report (HTML and Markdown) and print its path.

    Examples:
        report quickstart
        report quickstart speed --out /tmp/report
    """

    out: Path | None = option("--out FOLDER", "Where to write; RESULTS/reports/... if left out.")
    reference: str | None = option("--reference CELL", "The cell to compare with.")
    form: Literal["html", "pr"] = option(
        "--format", "A report, or the block of a pull request as Markdown.", "html"
    )

    def run(self) -> Answer:
        """One report, or a text to paste; 3 where nothing was measured, and the report says why."""
        store = self.store()
        if self.form == "pr":
            return self._post(store)
        names = [own for name in self.sweeps for own in store.sweeps_called(name) or [name]]
        names = names or store.sweeps()
        if not names and not store.imports.ids():
            raise UsageError(f"{self.results} holds no sweep yet; `mfsdp-bench run` makes one")
        paths = write_report_on(store, names, self.out, self.reference)
        document, data = [Paragraph(str(paths.html))], asdict(paths)
        if paths.measured_cells or (not paths.planned_cells and paths.imported_runs):
            return Answer(document, data)
        remark = f"nothing was measured in any of {paths.planned_cells} cells; the report says why"
        return Answer(document, data, exit_codes.NOTHING_MEASURED, (remark,))

    def _post(self, store: ResultsStore) -> Answer:
        """The block of a pull request; written where a folder is named."""
        from reports.posts.pull_request import pull_request

        text = pull_request(store, self.sweeps)
        if self.out is None:
            return Answer(text, {"markdown": text})
        path = self.out / "pr.md"
        console.write_file(path, text)
        return Answer([Paragraph(str(path))], {"markdown": text})


def write_report_on(
    store: ResultsStore, sweeps: list[str], out: Path | None = None, reference: str | None = None
) -> ReportPaths:
    """To `out`, or `RESULTS/reports/<sweep>`, `<sweep>-and-<n>-more`, `imported` without any."""
    from reports.build import write_report

    more = f"-and-{len(sweeps) - 1}-more" if len(sweeps) > 1 else ""
    usual = f"{sweeps[0]}{more}" if sweeps else "imported"
    return write_report(store, sweeps, out or store.root / "reports" / usual, reference=reference)
