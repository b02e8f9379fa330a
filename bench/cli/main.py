"""`mfsdp-bench`: the verbs, their options, and how every ending becomes an exit code.

Only typer is imported here. A verb imports what it needs when it runs, so that `--help` stays fast.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.cli import console
from bench.cli.crash import write_crash_report
from bench.cli.exit_codes import INTERNAL, INTERRUPTED, NOTHING_MEASURED, OK, USAGE

# The class of all refusals by the argument parser; typer carries its own copy of click in some
# versions, so it is found through a class that typer exports.
_ParserError: type[Any] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

app = typer.Typer(
    name="mfsdp-bench",
    help="Benchmark and validate fully sharded data parallel training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SweepFileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="SWEEP.yaml", help="A sweep file, or the name of one that comes with the tool."
    ),
]
ResultsOption = Annotated[Path, typer.Option("--results", help="The results folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Fix a setting in every cell."),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="EXPR", help="Keep matching cells: KEY=PATTERN[|...][,...]."),
]
SkipOption = Annotated[
    list[str] | None, typer.Option("--skip", metavar="EXPR", help="Drop matching cells.")
]
RepeatOption = Annotated[
    int | None, typer.Option("--repeat", min=1, max=1000, help="Runs of each cell.")
]
ArmOption = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        metavar="NAME=WHAT",
        help="A side of a comparison; WHAT is a git ref, . (the working tree), or pairs of"
        " git: repo: checkout: python: packages: with commas between. Two or more.",
    ),
]
InterleaveOption = Annotated[
    bool, typer.Option("--interleave", help="Run the arms in turn, block by block.")
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run id, or a part of one that is unique.")
]

PolicyOption = Annotated[
    Path | None,
    typer.Option("--policy", metavar="FILE.yaml", help="Tolerances and requirements."),
]

DEFAULT_RESULTS = Path("results")

baseline_app = typer.Typer(help="Named reference numbers.", no_args_is_help=True)
app.add_typer(baseline_app, name="baseline")


@app.command()
def plan(
    sweep: SweepFileArgument,
    *,
    set_: SetOption = None,
    only: OnlyOption = None,
    skip: SkipOption = None,
    repeat: RepeatOption = None,
    arm: ArmOption = None,
    interleave: InterleaveOption = False,
    json: JsonOption = False,
) -> int:
    """Show the cells of a sweep and why others are pruned. Starts no process."""
    from bench.cli import planning

    arms = tuple(arm or ())
    request = planning.Request(sweep, set_ or [], only or [], skip or [], repeat, arms, interleave)
    return planning.show_plan(request, as_json=json)


@app.command()
def run(  # noqa: PLR0913 - every option of the command line is a parameter
    sweep: SweepFileArgument,
    *,
    results: ResultsOption = DEFAULT_RESULTS,
    set_: SetOption = None,
    only: OnlyOption = None,
    skip: SkipOption = None,
    repeat: RepeatOption = None,
    arm: ArmOption = None,
    interleave: InterleaveOption = False,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Of the order of interleaved arms.")
    ] = None,
    block_retries: Annotated[
        int, typer.Option("--block-retries", min=0, help="Per block that a fault cost.")
    ] = 2,
    force: Annotated[bool, typer.Option("--force", help="Run finished cells again.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run failed cells again.")
    ] = False,
    max_failures: Annotated[
        int | None, typer.Option("--max-failures", min=1, help="Stop after so many failed runs.")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Write the report and print its path at the end.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Run what is missing of a sweep; finished cells with the same config and code are kept."""
    from bench.cli import planning, running

    arms = tuple(arm or ())
    request = planning.Request(sweep, set_ or [], only or [], skip or [], repeat, arms, interleave)
    options = running.Options(
        results, force, retry_failed, max_failures, report, json, block_retries, seed
    )
    return running.run_sweep(request, options)


@app.command()
def status(
    sweep: Annotated[
        str | None, typer.Argument(metavar="[SWEEP]", help="A sweep id; all if left out.")
    ] = None,
    *,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Show which runs of a sweep are done, failed or missing."""
    from bench.cli import statuses

    return statuses.show_status(results, sweep, as_json=json)


@app.command()
def show(
    run: RunArgument, *, results: ResultsOption = DEFAULT_RESULTS, json: JsonOption = False
) -> int:
    """Show one run (or validation): its configuration, how it ended, and its numbers."""
    from bench.cli import single_run

    return single_run.show_run(results, run, as_json=json)


@app.command()
def logs(
    run: RunArgument,
    *,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Only the log of this rank.")
    ] = None,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Print what the processes of a run printed."""
    from bench.cli import single_run

    return single_run.show_logs(results, run, rank, as_json=json)


@app.command()
def validate(  # noqa: PLR0913 - every option of the command line is a parameter
    engines: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ENGINE]...",
            help="mfsdp (if left out), fsdp2, ddp, single, or package.module:factory.",
        ),
    ] = None,
    *,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="All cases, or those that touch every axis.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, max=64, help="At most; 4 on a CPU.")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", "--only", metavar="PATTERN", help="Cases whose id matches."),
    ] = None,
    inject: Annotated[
        str | None,
        typer.Option("--inject", metavar="R1,...|all", help="Put historical bugs back first."),
    ] = None,
    case_seconds: Annotated[
        float, typer.Option("--case-seconds", min=1, help="After which a case counts as hung.")
    ] = 120.0,
    list_: Annotated[bool, typer.Option("--list", help="Print the ids of the cases.")] = False,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Check engines against plain torch: gradients, weights, wire and memory, case by case."""
    from bench.cli import validating

    asked = validating.Asked(
        tuple(engines or ()), full, ranks, tuple(case or ()), inject, case_seconds, list_, json
    )
    return validating.run_validation(results, asked)


@app.command()
def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A sweep or cell to compare with.")],
    head: Annotated[
        str | None,
        typer.Argument(
            metavar="[HEAD]", help="The sweep or cell to judge; left out: the arms of BASE."
        ),
    ] = None,
    *,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="PATH", help="A setting or section to set aside."),
    ] = None,
    policy: PolicyOption = None,
    form: Annotated[str, typer.Option("--format", metavar="[table|md]")] = "table",
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Compare two sweeps, cells (SWEEP:CELL), runs, or the arms of one sweep, with verdicts."""
    from bench.cli import comparing

    asked = comparing.Comparing(base, head, tuple(ignore or ()), form, json, policy)
    return comparing.show_comparison(results, asked)


@app.command()
def gate(  # noqa: PLR0913 - every option of the command line is a parameter
    sweep: Annotated[str, typer.Argument(metavar="SWEEP", help="A sweep id, or a sweep file.")],
    *,
    arm: ArmOption = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="SWEEP", help="Another sweep as base.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="NAME", help="A baseline, or its file.")
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="ARM", help="The arm to compare with.")
    ] = None,
    head: Annotated[
        str | None, typer.Option("--head", metavar="ARM", help="The arm to judge.")
    ] = None,
    policy: PolicyOption = None,
    confirm: Annotated[
        int, typer.Option("--confirm", min=0, help="More blocks to run before it fails.")
    ] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Undecided is exit code 4.")] = False,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write Markdown.")] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Annotations and the step summary of GitHub Actions.")
    ] = False,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Judge a sweep against its other arm, another sweep or a baseline; the exit code says it."""
    from bench.cli import gating

    asked = gating.Gating(
        sweep,
        tuple(arm or ()),
        against,
        baseline,
        base,
        head,
        policy,
        confirm,
        strict,
        junit,
        markdown,
        github,
        json,
    )
    return gating.run_gate(results, asked)


@app.command()
def noise(
    sweep: Annotated[
        Path | None,
        typer.Argument(metavar="[SWEEP.yaml]", help="What to calibrate with; none: show."),
    ] = None,
    *,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, max=1000, help="Blocks of two runs per cell.")
    ] = 10,
    set_: SetOption = None,
    only: OnlyOption = None,
    skip: SkipOption = None,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Measure how far identical code seems to be from itself here (A/A), or show what is known."""
    from bench.cli import calibrating, planning

    if sweep is None:
        return calibrating.show_noise(results, as_json=json)
    request = planning.Request(sweep, set_ or [], only or [], skip or [], repeat)
    return calibrating.run_noise(request, results, as_json=json)


@baseline_app.command("save")
def baseline_save(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A new name.")],
    sweep: Annotated[str, typer.Argument(metavar="SWEEP", help="A sweep that was run.")],
    *,
    arm: Annotated[str | None, typer.Option("--arm", help="One arm of it.")] = None,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Keep the numbers of a sweep as a small JSON file."""
    from bench.cli import baselines

    return baselines.save(results, name, sweep, arm=arm, as_json=json)


@baseline_app.command("list")
def baseline_list(*, results: ResultsOption = DEFAULT_RESULTS, json: JsonOption = False) -> int:
    """Show every baseline with its age and hardware."""
    from bench.cli import baselines

    return baselines.show_list(results, as_json=json)


@baseline_app.command("promote")
def baseline_promote(
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="A baseline, or its file.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name it takes over.")],
    *,
    reason: Annotated[str, typer.Option("--reason", help="Kept in its history.")] = "",
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Let one baseline take the place of another; that is written into it."""
    from bench.cli import baselines

    return baselines.promote_to(results, candidate, name, why=reason, as_json=json)


@app.command()
def report(
    sweeps: Annotated[
        list[str] | None, typer.Argument(metavar="[SWEEP]...", help="Sweep ids; all if left out.")
    ] = None,
    results: ResultsOption = DEFAULT_RESULTS,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to write to; RESULTS/reports/... if left out."),
    ] = None,
    reference: Annotated[
        str | None, typer.Option("--reference", metavar="CELL", help="The cell to compare with.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Write a Markdown and an HTML report from records, and print its path."""
    from bench.cli import reporting

    return reporting.write_reports(results, sweeps or [], out, reference, as_json=json)


@app.command()
def nccl(
    logs: Annotated[
        list[str],
        typer.Argument(metavar="LOG...", help="Files, folders, a run's folder, or - for stdin."),
    ],
    *,
    require: Annotated[
        str | None,
        typer.Option("--require", metavar="OP=KIND,...", help="Fail unless met, as AG=sym,RS=sym."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="NAME", help="The requirements of a topology."),
    ] = None,
    after_iteration: Annotated[
        int | None,
        typer.Option("--after-iteration", min=0, help="Judge only what follows iteration N."),
    ] = None,
    min_bytes: Annotated[
        int, typer.Option("--min-bytes", min=0, help="Judge only messages of at least N bytes.")
    ] = 0,
    form: Annotated[str, typer.Option("--format", metavar="[table|json|md]")] = "table",
    junit: Annotated[
        Path | None, typer.Option("--junit", help="Write the requirements' results as JUnit.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Say which NCCL kernel ran for each collective, and why not the symmetric one."""
    from bench.cli import nccl_audit

    shown = "json" if json else form
    return nccl_audit.show_audit(
        nccl_audit.Request(logs, require, profile, after_iteration, min_bytes, shown, junit)
    )


@app.command()
def doctor(json: JsonOption = False) -> int:
    """Say what this machine and this installation can run."""
    from bench.cli import diagnosis

    return diagnosis.show_diagnosis(as_json=json)


@app.command()
def schema(
    what: Annotated[str, typer.Argument(metavar="[sweep|run]", help="Which document.")] = "sweep",
    *,
    json: JsonOption = False,  # noqa: ARG001 - accepted like everywhere; it is JSON anyway
) -> int:
    """Print the JSON Schema of a sweep file or of a run."""
    from bench.cli import schemas

    return schemas.show_schema(what)


def run_command_line(arguments: list[str]) -> int:
    """Run one command and return its exit code; never raises."""
    try:
        result = app(arguments, prog_name="mfsdp-bench", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else OK
    except (KeyboardInterrupt, typer.Abort):
        console.note("interrupted")
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):
        # The reader of the parser's own output (--help) has gone: click then leaves with 1, which
        # would read as a regression. Nothing else raises SystemExit.
        console.silence(sys.stdout)
        return OK
    except Exception as error:
        return _refused(error, arguments)


def _refused(error: Exception, arguments: list[str]) -> int:
    from bench.errors import BenchError

    if isinstance(error, _ParserError):
        message = error.format_message()
        if message:
            console.error(f"{message} (mfsdp-bench --help lists verbs and options)")
        return USAGE
    if isinstance(error, BenchError) and error.exit_code != INTERNAL:
        console.error(str(error))
        return error.exit_code
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        console.silence(sys.stdout)  # what is left in its buffer cannot be written either
        console.error(f"no space to write to: {error.filename or 'the output'}")
        return NOTHING_MEASURED
    place = write_crash_report(error, arguments)
    where = f"the traceback is in {place}" if place else "the traceback could not be written"
    first = (str(error).splitlines() or [""])[0]
    console.error(f"internal error: {type(error).__name__}: {first[:300]}; {where}")
    return INTERNAL


def main() -> None:
    """Entry point of the `mfsdp-bench` command."""
    # A stream that the caller has closed is None; what would go there is dropped.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - open until the end
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - open until the end
    for stream in (sys.stdout, sys.stderr):
        # A locale without a character of a description or path is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run_command_line(sys.argv[1:]))


if __name__ == "__main__":
    main()
