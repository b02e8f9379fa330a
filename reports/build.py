"""`write_report`: from records to one HTML file and one Markdown file with its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.errors import UsageError
from bench.store import ResultsStore
from bench.store.atomic import reporting_failed_writes, write_text_atomically
from reports.findings import Findings, find
from reports.renderers.document import Block, Document, Figure, Section
from reports.renderers.render import render
from reports.sections import steps
from reports.sections.appendix import appendix
from reports.sections.cell_table import cells_section
from reports.sections.comparison import arms_section, comparison, imported_section
from reports.sections.memory import memory_section
from reports.sections.method import method, reproduce
from reports.sections.nccl import gradient_sums_section, nccl_section
from reports.sections.parity import parity_section
from reports.sections.switches import switches_section
from reports.sections.unmeasured import unmeasured
from reports.sections.validation import validation_section
from reports.sections.what_ran import what_ran
from reports.views.sweep_view import load_sweeps

SECTIONS: list[tuple[str, str, Callable[[Findings], Iterable[Block]]]] = [
    ("what-ran", "What ran", what_ran),
    # Is it equal?
    ("parity", "Loss parity", parity_section),
    ("switches", "One switch at a time", switches_section),
    ("validation", "Correctness", validation_section),
    # Is it faster?
    ("arms", "Arms, block by block", arms_section),
    ("cells", "Cells", cells_section),
    ("comparison", "Comparison", comparison),
    # What does it cost?
    ("memory", "Memory of one step", memory_section),
    ("counts", "What a step does", steps.counts_section),
    ("phases", "Parts of a step", steps.phases_section),
    ("imported", "Imported runs", imported_section),
    ("nodes", "Nodes", steps.nodes_section),
    ("communication", "Exposed communication", steps.communication_section),
    # Which kernels?
    ("sums", "Gradient sums", gradient_sums_section),
    ("nccl", "NCCL kernels", nccl_section),
    # What was not measured?
    ("not-measured", "Not measured", unmeasured),
    ("method", "How to read the numbers", method),
    ("reproduce", "Reproduce", reproduce),
    ("appendix", "Appendix", appendix),
]
"""Anchor, title and blocks, in the order in which a reviewer asks; one without any is left out."""


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
    out = Path(out_dir).expanduser().absolute()
    try:  # before the work that would be lost
        with reporting_failed_writes(out):
            (out / "figures").mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(
            f"cannot write a report into {out}: {error.filename} is no folder; name a folder"
        ) from error
    views = load_sweeps(store, sweep_ids) if sweep_ids else []
    findings = find(store, views, reference)
    document = build_document(findings)
    drawn = [b for s in document.sections for b in s.blocks if isinstance(b, Figure)]
    files = {out / "figures" / f"{figure.name}.svg": figure.svg for figure in drawn}
    page, text = out / "report.html", out / "report.md"
    for path, content in files.items():
        write_text_atomically(path, content)
    write_text_atomically(text, render(document, "md"))
    write_text_atomically(page, render(document, "html"))
    imported = len(store.imports.ids())
    measured = len(findings.measured)
    return ReportPaths(page, text, tuple(files), measured, findings.planned, imported)


def build_document(findings: Findings) -> Document:
    """All of `SECTIONS` that have something to say."""
    names = ", ".join(sweep.id for sweep in findings.sweeps) or "imported runs"
    sources = ", ".join(sweep.source for sweep in findings.sweeps if sweep.source)
    sections = (
        Section(anchor, title, tuple(blocks(findings)))
        for anchor, title, blocks in SECTIONS
        if findings.sweeps or anchor == "imported"
    )
    return Document(
        title=f"mfsdp-bench report: {names}",
        subtitle=f"from {sources}" if sources else "",
        sections=tuple(section for section in sections if section.blocks),
        footer="Rebuilt from the records of the results folder; raw samples are never edited.",
    )
