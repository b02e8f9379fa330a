"""What a results folder holds, and what logs and texts of others say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.cli import completing
from bench.cli.options import DEFAULT_RESULTS, Policy, Results, RunId, SweepIds


@dataclass(frozen=True, kw_only=True)
class StatusRequest:
    """Show which runs of a sweep are done, failed or missing."""

    sweep: Annotated[
        str | None,
        typer.Argument(
            metavar="SWEEP", autocompletion=completing.sweeps, help="A sweep id; all if left out."
        ),
    ] = None
    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class ShowRequest:
    """Show one run: its configuration, how it ended and its numbers.

    Takes the id of a validation as well.
    """

    run: RunId
    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class LogsRequest:
    """Print what the processes of a run printed."""

    run: RunId
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", min=0, help="Only the log of this rank.")
    ] = None
    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """Write a report (HTML and Markdown) and print its path."""

    sweeps: SweepIds = ()
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Where to write; RESULTS/reports/... if left out."
        ),
    ] = None
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="CELL",
            autocompletion=completing.cells,
            help="The cell to compare with.",
        ),
    ] = None
    form: Annotated[
        Literal["html", "pr", "matrix"],
        typer.Option(
            "--format",
            help="A report; the block of a pull request, or a table by axes, as Markdown.",
        ),
    ] = "html"
    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class HistoryRequest:
    """Show a metric over commits and days, and its changes.

    Prints tables, and writes a page that opens from its file. Gates judge a change; this verb
    finds the commit or the night with which one came.
    """

    metric: Annotated[
        str,
        typer.Argument(
            metavar="METRIC",
            autocompletion=completing.metrics,
            help="A metric that gates judge, as step_time, memory or loss.",
        ),
    ]
    archives: Annotated[
        tuple[Path, ...],
        typer.Option(
            "--archive", metavar="PATH", help="A file of starts, or another results folder, too."
        ),
    ] = ()
    append: Annotated[
        Path | None,
        typer.Option(
            "--append", metavar="FILE", help="Add the starts of RESULTS to this file, and read it."
        ),
    ] = None
    policy: Policy = None
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Where to write; RESULTS/reports/history-METRIC."
        ),
    ] = None
    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class ImportRequest:
    """Keep the runs in a log or text of another framework."""

    logs: Annotated[
        tuple[str, ...],
        typer.Argument(
            metavar="LOG",
            help="Files, folders, or - for standard input; the list of imports if left out.",
        ),
    ] = ()
    form: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="[megatron|torchtitan|nemo|deepspeed|trainer|table]",
            help="What wrote it; found if left out.",
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="That of the file if left out; before the labels of several runs in it.",
        ),
    ] = None
    facts: Annotated[
        tuple[str, ...],
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="What the log does not say, as seq_len=8192."
        ),
    ] = ()
    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class LintRequest:
    """Say what pasted or measured evidence does not support.

    Configuration that is not stated, trade-offs that are not named, claims that the numbers do not
    give, and comparisons of unlike things.
    """

    what: Annotated[
        tuple[str, ...],
        typer.Argument(
            metavar="FILE|RUN",
            help="Texts, folders of them, or - for standard input; imports, sweeps, SWEEP:CELL.",
        ),
    ]
    ignore: Annotated[
        tuple[str, ...],
        typer.Option(
            "--ignore", metavar="RULE[@RUN]=REASON", help="Silence a rule, in all runs or in one."
        ),
    ] = ()
    form: Annotated[
        Literal["table", "md", "github"], typer.Option("--format", help="How to print.")
    ] = "table"
    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """Write runs and steps as tables for other tools.

    Two files: one row per run, and one row per step of a rank. Units are in the names of columns.
    The same frames for a notebook: reports.frames.read_frames("results").
    """

    sweeps: SweepIds = ()
    form: Annotated[
        Literal["csv", "json", "parquet"],
        typer.Option("--to", help="The format of the files."),
    ] = "csv"
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Where to write; RESULTS/export if left out."),
    ] = None
    results: Results = DEFAULT_RESULTS
