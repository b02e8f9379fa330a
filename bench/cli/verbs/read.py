"""`status`, `show`, `logs`, `report`, `history` and `export`: what a results folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.cli import completing
from bench.cli.options import (
    DEFAULT_RESULTS,
    JsonOption,
    PolicyOption,
    ResultsOption,
    RunArgument,
    SweepsArgument,
)


def status(
    sweep: Annotated[
        str | None,
        typer.Argument(
            metavar="[SWEEP]", autocompletion=completing.sweeps, help="A sweep id; all if left out."
        ),
    ] = None,
    *,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Show which runs of a sweep are done, failed or missing."""
    from bench.cli import statuses

    return statuses.show_status(results, sweep, as_json=json)


def show(
    run: RunArgument, *, results: ResultsOption = DEFAULT_RESULTS, json: JsonOption = False
) -> int:
    """Show one run: its configuration, how it ended and its numbers.

    Takes the id of a validation as well.
    """
    from bench.cli import single_run

    return single_run.show_run(results, run, as_json=json)


def logs(
    run: RunArgument,
    *,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", min=0, help="Only the log of this rank.")
    ] = None,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Print what the processes of a run printed."""
    from bench.cli import single_run

    return single_run.show_logs(results, run, rank, as_json=json)


def report(
    sweeps: SweepsArgument = None,
    *,
    results: ResultsOption = DEFAULT_RESULTS,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Where to write; RESULTS/reports/... if left out."
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="CELL",
            autocompletion=completing.cells,
            help="The cell to compare with.",
        ),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="[html|pr|matrix]",
            help="A report; the block of a pull request, or a table by axes, as Markdown.",
        ),
    ] = "html",
    json: JsonOption = False,
) -> int:
    """Write a report (HTML and Markdown) and print its path."""
    from bench.cli import reporting

    if form != "html":
        return reporting.write_post(results, sweeps or [], out, form, as_json=json)
    return reporting.write_reports(results, sweeps or [], out, reference, as_json=json)


def history(
    metric: Annotated[
        str,
        typer.Argument(
            metavar="METRIC",
            autocompletion=completing.metrics,
            help="A metric that gates judge, as step_time, memory or loss.",
        ),
    ],
    *,
    results: ResultsOption = DEFAULT_RESULTS,
    archives: Annotated[
        list[Path] | None,
        typer.Option(
            "--archive", metavar="PATH", help="A file of starts, or another results folder, too."
        ),
    ] = None,
    append: Annotated[
        Path | None,
        typer.Option(
            "--append", metavar="FILE", help="Add the starts of RESULTS to this file, and read it."
        ),
    ] = None,
    policy: PolicyOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Where to write; RESULTS/reports/history-METRIC."
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Show a metric over commits and days, and its changes.

    Prints tables, and writes a page that opens from its file. Gates judge a change; this verb
    finds the commit or the night with which one came.
    """
    from bench.cli import histories

    return histories.show_history(
        metric,
        results,
        archives=archives or [],
        append=append,
        policy_file=policy,
        out=out,
        as_json=json,
    )


def import_(
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LOG]...",
            help="Files, folders, or - for standard input; the list of imports if left out.",
        ),
    ] = None,
    *,
    form: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="[megatron|torchtitan|nemo|deepspeed|trainer|table]",
            help="What wrote it; found if left out.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="That of the file if left out; before the labels of several runs in it.",
        ),
    ] = None,
    facts: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="What the log does not say, as seq_len=8192."
        ),
    ] = None,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Keep the runs in a log or text of another framework."""
    from bench.cli import importing

    return importing.import_logs(
        results, logs or [], form=form, name=name, facts=facts or [], as_json=json
    )


def lint(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|RUN...",
            help="Texts, folders of them, or - for standard input; imports, sweeps, SWEEP:CELL.",
        ),
    ],
    *,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore", metavar="RULE[@RUN]=REASON", help="Silence a rule, in all runs or in one."
        ),
    ] = None,
    form: Annotated[str, typer.Option("--format", metavar="[table|md|json|github]")] = "table",
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Say what pasted or measured evidence does not support.

    Configuration that is not stated, trade-offs that are not named, claims that the numbers do not
    give, and comparisons of unlike things.
    """
    from bench.cli import linting

    return linting.show_lint(results, what, ignore=ignore or [], form=form, as_json=json)


def export(
    sweeps: SweepsArgument = None,
    *,
    to: Annotated[
        str, typer.Option("--to", metavar="[csv|json|parquet]", help="The format of the files.")
    ] = "csv",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Where to write; RESULTS/export if left out."),
    ] = None,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Write runs and steps as tables for other tools.

    Two files: one row per run, and one row per step of a rank. Units are in the names of columns.
    The same frames for a notebook: reports.frames.read_frames("results").
    """
    from bench.cli import exporting

    return exporting.export(results, sweeps or [], to, out or results / "export", as_json=json)
