"""`compare`, `gate`, `noise`, `bisect` and `baseline`: verdicts, and what they rest on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.cli import completing
from bench.cli.options import (
    DEFAULT_RESULTS,
    Arms,
    Budget,
    CellsRequest,
    Policy,
    Results,
    SweepFile,
)


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """Compare two sweeps, cells or runs, or the arms of one sweep.

    A cell is written SWEEP:CELL. Of a sweep file, what is asked for now must be what was
    measured: 3 if nothing was, 5 if an arm was other code.
    """

    base: Annotated[
        str,
        typer.Argument(
            metavar="BASE",
            autocompletion=completing.judged,
            help="A sweep or cell to compare with, or a sweep file.",
        ),
    ]
    head: Annotated[
        str | None,
        typer.Argument(
            metavar="HEAD",
            autocompletion=completing.judged,
            help="The sweep or cell to judge; left out: the arms of BASE.",
        ),
    ] = None
    arms: Arms = ()
    ignore: Annotated[
        tuple[str, ...],
        typer.Option("--ignore", metavar="PATH", help="A setting or section to set aside."),
    ] = ()
    policy: Policy = None
    form: Annotated[Literal["table", "md"], typer.Option("--format", help="How to print.")] = (
        "table"
    )
    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class GateRequest:
    """Judge a sweep; the exit code is the verdict.

    It is compared with its other arm, with another sweep or with a baseline. With --budget, blocks
    of both arms are run until every required comparison is decided. A sweep file and its arms are
    looked up as `run` does: what was measured must be what they are now. Exit codes: 0 passed,
    1 regressed, 3 a cell was not measured, 4 undecided (with --strict), 5 not comparable.
    """

    sweep: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP", autocompletion=completing.judged, help="A sweep id, or a sweep file."
        ),
    ]
    arms: Arms = ()
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="SWEEP",
            autocompletion=completing.sweeps,
            help="Another sweep as base.",
        ),
    ] = None
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="NAME", help="A baseline, or its file.")
    ] = None
    base_arm: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="ARM", autocompletion=completing.arms, help="The arm to compare with."
        ),
    ] = None
    head_arm: Annotated[
        str | None,
        typer.Option(
            "--head", metavar="ARM", autocompletion=completing.arms, help="The arm to judge."
        ),
    ] = None
    policy: Policy = None
    confirm: Annotated[
        int,
        typer.Option("--confirm", metavar="N", min=0, help="More blocks to run before it fails."),
    ] = 0
    budget: Budget = None
    only: Annotated[
        tuple[str, ...],
        typer.Option(
            "--only",
            metavar="CELL",
            autocompletion=completing.cells,
            help="Judge this cell only: an id, or a pattern.",
        ),
    ] = ()
    any_nodes: Annotated[
        bool, typer.Option("--any-nodes", help="Compare what different nodes have measured.")
    ] = False
    packed: Annotated[
        bool, typer.Option("--packed", help="Judge times of runs that went on side by side.")
    ] = False
    strict: Annotated[bool, typer.Option("--strict", help="Undecided is exit code 4.")] = False
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")
    ] = None
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write Markdown.")
    ] = None
    github: Annotated[
        bool, typer.Option("--github", help="Annotations and the step summary of GitHub Actions.")
    ] = False
    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class NoiseRequest:
    """Measure how far equal code seems to differ here (A/A).

    Without SWEEP, show what has been measured before.
    """

    sweep: Annotated[
        Path | None,
        typer.Argument(
            metavar="SWEEP",
            autocompletion=completing.sweep_files,
            help="What to calibrate with; none: show.",
        ),
    ] = None
    repeat: Annotated[
        int,
        typer.Option("--repeat", metavar="N", min=1, max=1000, help="Blocks of two runs per cell."),
    ] = 10
    cells: CellsRequest = field(default_factory=CellsRequest)
    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class BisectRequest:
    """Find the commit that changed a metric.

    Counts, bytes, memory and losses take one run per commit, times as many blocks as decide. The
    same command goes on where it was interrupted. Commits that cannot run are skipped.
    """

    sweep: SweepFile
    good: Annotated[str, typer.Option("--good", metavar="REF", help="A commit without the change.")]
    bad: Annotated[
        str, typer.Option("--bad", metavar="REF", help="A later commit that has it.")
    ] = "HEAD"
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="What changed, as a policy names it.")
    ]
    repo: Annotated[
        Path | None,
        typer.Option("--repo", metavar="PATH", help="Repository of the commits, if another one."),
    ] = None
    most_blocks: Annotated[
        int,
        typer.Option("--max-blocks", metavar="N", min=6, help="Blocks per commit, for times."),
    ] = 16
    policy: Policy = None
    cells: CellsRequest = field(default_factory=CellsRequest)
    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """Keep the numbers of a sweep as a small JSON file."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="A new name.")]
    sweep: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP", autocompletion=completing.sweeps, help="A sweep that was run."
        ),
    ]
    arm: Annotated[
        str | None,
        typer.Option("--arm", metavar="ARM", autocompletion=completing.arms, help="One arm of it."),
    ] = None
    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class ListRequest:
    """Show every baseline with its age and hardware."""

    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class PromoteRequest:
    """Let one baseline take the place of another.

    The change is written into its history.
    """

    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="A baseline, or its file.")]
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name it takes over.")]
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Kept in its history.")
    ] = ""
    results: Results = DEFAULT_RESULTS
