"""`compare`, `gate`, `noise` and `bisect`: verdicts, what they rest on, and since when."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.cli import completing
from bench.cli.options import (
    DEFAULT_RESULTS,
    ArmOption,
    BudgetOption,
    JsonOption,
    OnlyOption,
    PolicyOption,
    ResultsOption,
    SetOption,
    SkipOption,
    SweepFileArgument,
)


def compare(
    base: Annotated[
        str,
        typer.Argument(
            metavar="BASE",
            autocompletion=completing.judged,
            help="A sweep or cell to compare with, or a sweep file.",
        ),
    ],
    head: Annotated[
        str | None,
        typer.Argument(
            metavar="[HEAD]",
            autocompletion=completing.judged,
            help="The sweep or cell to judge; left out: the arms of BASE.",
        ),
    ] = None,
    *,
    arm: ArmOption = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="PATH", help="A setting or section to set aside."),
    ] = None,
    policy: PolicyOption = None,
    form: Annotated[str, typer.Option("--format", metavar="[table|md]")] = "table",
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Compare two sweeps, cells or runs, or the arms of one sweep.

    A cell is written SWEEP:CELL. Of a sweep file, what is asked for now must be what was
    measured: 3 if nothing was, 5 if an arm was other code.
    """
    from bench.cli import comparing

    return comparing.show_comparison(
        results,
        base,
        head,
        ignore=ignore or (),
        policy=policy,
        form=form,
        as_json=json,
        arms=tuple(arm or ()),
    )


def gate(  # noqa: PLR0913 - every option of the command line is a parameter
    sweep: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP", autocompletion=completing.judged, help="A sweep id, or a sweep file."
        ),
    ],
    *,
    arm: ArmOption = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="SWEEP",
            autocompletion=completing.sweeps,
            help="Another sweep as base.",
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="NAME", help="A baseline, or its file.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="ARM", autocompletion=completing.arms, help="The arm to compare with."
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            "--head", metavar="ARM", autocompletion=completing.arms, help="The arm to judge."
        ),
    ] = None,
    policy: PolicyOption = None,
    confirm: Annotated[
        int,
        typer.Option("--confirm", metavar="N", min=0, help="More blocks to run before it fails."),
    ] = 0,
    budget: BudgetOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="CELL",
            autocompletion=completing.cells,
            help="Judge this cell only: an id, or a pattern.",
        ),
    ] = None,
    any_nodes: Annotated[
        bool, typer.Option("--any-nodes", help="Compare what different nodes have measured.")
    ] = False,
    packed: Annotated[
        bool, typer.Option("--packed", help="Judge times of runs that went on side by side.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Undecided is exit code 4.")] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write Markdown.")
    ] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Annotations and the step summary of GitHub Actions.")
    ] = False,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Judge a sweep; the exit code is the verdict.

    It is compared with its other arm, with another sweep or with a baseline. With --budget, blocks
    of both arms are run until every required comparison is decided. A sweep file and its arms are
    looked up as `run` does: what was measured must be what they are now. Exit codes: 0 passed,
    1 regressed, 3 a cell was not measured, 4 undecided (with --strict), 5 not comparable.
    """
    from bench.cli import gating
    from bench.cli.duration import parsed_seconds

    request = gating.GateRequest(
        sweep,
        tuple(arm or ()),
        against,
        baseline,
        base,
        head,
        policy,
        confirm,
        None if budget is None else parsed_seconds(budget, "--budget"),
        strict,
        junit,
        markdown,
        github,
        json,
        any_nodes,
        packed,
        tuple(only or ()),
    )
    return gating.run_gate(results, request)


def noise(
    sweep: Annotated[
        Path | None,
        typer.Argument(metavar="[SWEEP.yaml]", help="What to calibrate with; none: show."),
    ] = None,
    *,
    repeat: Annotated[
        int,
        typer.Option("--repeat", metavar="N", min=1, max=1000, help="Blocks of two runs per cell."),
    ] = 10,
    set_: SetOption = None,
    only: OnlyOption = None,
    skip: SkipOption = None,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Measure how far equal code seems to differ here (A/A).

    Without SWEEP, show what has been measured before.
    """
    from bench.cli import calibrating, planning

    if sweep is None:
        return calibrating.show_noise(results, as_json=json)
    request = planning.Request(sweep, set_ or [], only or [], skip or [], repeat)
    return calibrating.run_noise(request, results, as_json=json)


def bisect(  # noqa: PLR0913 - every option of the command line is a parameter
    sweep: SweepFileArgument,
    *,
    good: Annotated[
        str, typer.Option("--good", metavar="REF", help="A commit without the change.")
    ],
    bad: Annotated[
        str, typer.Option("--bad", metavar="REF", help="A later commit that has it.")
    ] = "HEAD",
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="What changed, as a policy names it.")
    ],
    repo: Annotated[
        Path | None,
        typer.Option("--repo", metavar="PATH", help="Repository of the commits, if another one."),
    ] = None,
    most_blocks: Annotated[
        int,
        typer.Option("--max-blocks", metavar="N", min=6, help="Blocks per commit, for times."),
    ] = 16,
    policy: PolicyOption = None,
    set_: SetOption = None,
    only: OnlyOption = None,
    skip: SkipOption = None,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Find the commit that changed a metric.

    Counts, bytes, memory and losses take one run per commit, times as many blocks as decide. The
    same command goes on where it was interrupted. Commits that cannot run are skipped.
    """
    from bench.cli import bisecting, planning

    wanted = planning.Request(sweep, set_ or [], only or [], skip or [], None)
    request = bisecting.BisectRequest(wanted, good, bad, metric, repo, policy, most_blocks, json)
    return bisecting.run_bisect(results, request)
