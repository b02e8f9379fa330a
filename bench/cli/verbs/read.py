"""What a results folder holds, and what logs and texts of others say."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from bench.cli.completion import offer_kept
from bench.cli.options import RESULTS, SWEEP_IDS, argument, option, verb


@verb(
    "status",
    "statuses.show_status",
    "status",
    "status quickstart",
    "status quickstart:ddp-fp32 --json",
    "status 8f3a --logs",
)
class StatusRequest:
    """Show which runs of a sweep are done or missing, or one run.

    Of a run: its configuration, how it ended and its numbers.
    """

    name: str | None = argument(
        "SWEEP|RUN",
        "A sweep id; a run id, a unique part of one, or SWEEP:CELL; or the id of a validation."
        " All sweeps if left out.",
        None,
        offer_kept,
    )
    logs: bool = option("--logs", "Print what the processes of the run printed.", False)
    results: Path = RESULTS


@verb(
    "report",
    "reporting.report",
    "report quickstart",
    "report quickstart speed --out /tmp/report",
)
class ReportRequest:
    """Write a report (HTML and Markdown) and print its path."""

    sweeps: tuple[str, ...] = SWEEP_IDS
    out: Path | None = option("--out FOLDER", "Where to write; RESULTS/reports/... if left out.")
    reference: str | None = option("--reference CELL", "The cell to compare with.")
    form: Literal["html", "pr"] = option(
        "--format", "A report, or the block of a pull request as Markdown.", "html"
    )
    results: Path = RESULTS


@verb(
    "import",
    "importing.import_logs",
    "import base.log --set device=H100 --set seq_len=8192",
    "import head.log && mfsdp-bench compare base head --format md",
    "import - --name pr3067 < page.txt",
)
class ImportRequest:
    """Keep the runs in a log or text of another framework."""

    logs: tuple[str, ...] = argument(
        "LOG", "Files, folders, or - for standard input; the list of imports if left out.", ()
    )
    form: str | None = option(
        "--format NAME|FILE",
        "What wrote it, as megatron, or a row of your own in YAML; found if left out.",
    )
    name: str | None = option(
        "--name NAME",
        "That of the file if left out; before the labels of several runs in it.",
    )
    facts: tuple[str, ...] = option(
        "--set FIELD=VALUE", "What the log does not say, as seq_len=8192.", ()
    )
    results: Path = RESULTS


@verb(
    "export",
    "exporting.export",
    "export --format csv",
    "export speed --format bencher --out /tmp/speed",
)
class ExportRequest:
    """Write runs and steps as tables, or files that other tools read.

    csv, json, parquet: one row per run, and one per step of a rank; units are in the names of
    columns (reports.frames.read_frames("results") has the same). golden, torchtitan: values of
    steps, a file per run. pytorch, bencher, github-action-benchmark, asv: a number per cell.
    """

    sweeps: tuple[str, ...] = SWEEP_IDS
    form: Literal[
        "csv",
        "json",
        "parquet",
        "golden",
        "torchtitan",
        "pytorch",
        "bencher",
        "github-action-benchmark",
        "asv",
    ] = option("--format", "The format of the files.", "csv")
    out: Path | None = option("--out FOLDER", "Where to write; RESULTS/export if left out.")
    results: Path = RESULTS
