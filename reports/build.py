"""`write_report`: from records to one HTML file and one Markdown file with its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.errors import UsageError
from bench.store import ResultsStore
from bench.store.atomic import reporting_failed_writes, write_text_atomically
from reports.findings import Findings, find
from reports.renderers import html, markdown
from reports.renderers.document import Document, Figure, Section
from reports.sections.appendix import appendix
from reports.sections.cell_table import cells_section
from reports.sections.comparison import arms_section, comparison, imported_section
from reports.sections.memory import memory_section
from reports.sections.method import method, reproduce
from reports.sections.nccl import gradient_sums_section, nccl_section
from reports.sections.parity import parity_section
from reports.sections.steps import (
    communication_section,
    counts_section,
    nodes_section,
    phases_section,
)
from reports.sections.switches import switches_section
from reports.sections.unmeasured import unmeasured
from reports.sections.validation import validation_section
from reports.sections.what_ran import what_ran
from reports.views.sweep_view import load_sweeps

HTML_NAME = "report.html"
MARKDOWN_NAME = "report.md"

SECTIONS: list[Callable[[Findings], Section | None]] = [
    what_ran,
    # Is it equal?
    parity_section,
    switches_section,
    validation_section,
    # Is it faster?
    arms_section,
    cells_section,
    comparison,
    # What does it cost?
    memory_section,
    counts_section,
    phases_section,
    imported_section,
    nodes_section,
    communication_section,
    # Which kernels?
    gradient_sums_section,
    nccl_section,
    # What was not measured?
    unmeasured,
    method,
    reproduce,
    appendix,
]
"""In the order in which a reviewer asks. A section is a function of what was found; None where it
has nothing to say."""


@dataclass(frozen=True)
class ReportPaths:
    """What was written, and how many cells stand behind it (0 measured: nothing to show)."""

    html: Path
    markdown: Path
    figures: tuple[Path, ...]
    measured_cells: int
    planned_cells: int
    imported_runs: int = 0


def write_report(
    store: ResultsStore,
    sweep_ids: Sequence[str],
    out_dir: str | Path,
    *,
    reference: str | None = None,
) -> ReportPaths:
    """Write `report.html` (self-contained), `report.md` and `figures/*.svg` into `out_dir`.

    Everything is rebuilt from the records; failed, pruned and damaged runs are part of the report.

    Args:
        store: the results folder.
        sweep_ids: sweeps to put into one report; none for one on the imported runs alone.
        out_dir: made if it is missing; older files of these names are replaced.
        reference: name of the cell to compare with; None chooses one by a stated rule.

    Raises:
        UsageError: an unknown sweep or reference, or a folder that cannot be written.
        StoreFullError: no space.
    """
    out = _made_folder(Path(out_dir).expanduser().absolute())
    views = load_sweeps(store, sweep_ids) if sweep_ids else []
    findings = find(store, views, reference)
    written, figures = write_document(build_document(findings), out)
    return ReportPaths(
        html=written / HTML_NAME,
        markdown=written / MARKDOWN_NAME,
        figures=figures,
        measured_cells=len(findings.measured),
        planned_cells=findings.planned,
        imported_runs=len(store.imports.ids()),
    )


def write_document(document: Document, out_dir: Path) -> tuple[Path, tuple[Path, ...]]:
    """The page, the Markdown and the figures of any document; the folder, made, and the figures.

    Raises:
        UsageError: a folder that cannot be written.
        StoreFullError: no space.
    """
    out = _made_folder(out_dir.expanduser().absolute())
    drawn = [b for s in document.sections for b in s.blocks if isinstance(b, Figure)]
    figures = tuple(out / "figures" / f"{figure.name}.svg" for figure in drawn)
    for path, figure in zip(figures, drawn, strict=True):
        write_text_atomically(path, figure.svg)
    write_text_atomically(out / MARKDOWN_NAME, markdown.render(document))
    write_text_atomically(out / HTML_NAME, html.render(document))
    return out, figures


def _made_folder(out: Path) -> Path:
    """The folder and its place for figures, made before the work that would be lost."""
    try:
        with reporting_failed_writes(out):
            (out / "figures").mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(
            f"cannot write a report into {out}: {error.filename} is no folder; name a folder"
        ) from error
    return out


def build_document(findings: Findings) -> Document:
    """All of `SECTIONS` that have something to say."""
    names = ", ".join(sweep.id for sweep in findings.sweeps) or "imported runs"
    sources = ", ".join(sweep.source for sweep in findings.sweeps if sweep.source)
    chosen = SECTIONS if findings.sweeps else [imported_section]
    found = (section(findings) for section in chosen)
    return Document(
        title=f"mfsdp-bench report: {names}",
        subtitle=f"from {sources}" if sources else "",
        sections=tuple(section for section in found if section is not None),
        footer="Rebuilt from the records of the results folder; raw samples are never edited.",
    )
