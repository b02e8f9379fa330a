"""`plan` and `run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.cli import completing
from bench.cli.options import (
    DEFAULT_RESULTS,
    ArmOption,
    BudgetOption,
    DeviceOption,
    GpusOption,
    InterleaveOption,
    JsonOption,
    LauncherOption,
    LauncherSetOption,
    OnlyOption,
    OptionalSweepArgument,
    PolicyOption,
    ProfileOption,
    RepeatOption,
    ResultsOption,
    SetOption,
    SkipOption,
    SlurmOption,
    SweepFileArgument,
)


def plan(  # noqa: PLR0913 - every option of the command line is a parameter
    sweep: SweepFileArgument,
    *,
    set_: SetOption = None,
    only: OnlyOption = None,
    skip: SkipOption = None,
    repeat: RepeatOption = None,
    arm: ArmOption = None,
    interleave: InterleaveOption = False,
    launcher: LauncherOption = "local",
    launcher_option: LauncherSetOption = None,
    profile: ProfileOption = None,
    slurm: SlurmOption = None,
    device: DeviceOption = None,
    gpus: GpusOption = None,
    json: JsonOption = False,
) -> int:
    """Show the cells of a sweep, and why others are pruned.

    Starts no process. SWEEP is a file, or the name of a sweep that comes with the tool. With
    --device and --gpus the plan is for such a machine, with all optional packages.
    """
    from bench.cli import launchers, planning

    arms = tuple(arm or ())
    jobs = launchers.LauncherRequest(
        launcher, profile, tuple(slurm or ()), assignments=tuple(launcher_option or ())
    )
    request = planning.Request(
        sweep,
        set_ or [],
        only or [],
        skip or [],
        repeat,
        arms,
        interleave,
        jobs,
        machine=planning.machine_of(device, gpus),
    )
    return planning.show_plan(request, as_json=json)


def fit(  # noqa: PLR0913 - every option of the command line is a parameter
    sweep: OptionalSweepArgument = None,
    *,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PRESET|config.json", help="A model instead of a sweep."),
    ] = None,
    set_: SetOption = None,
    only: OnlyOption = None,
    skip: SkipOption = None,
    device: DeviceOption = None,
    gpus: GpusOption = None,
    search: Annotated[
        bool, typer.Option("--search", help="Try GPUs and switches; rank what fits by its cost.")
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="Trace every layer, not a few of those that repeat.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the memory of a step (--model)."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Say what each rank would hold and send, without running.

    The engine's own code runs on tensors without contents. With --device and --gpus it says
    whether that fits; a model alone needs both.
    """
    from bench.cli import fitting

    request = fitting.Request(
        sweep, model, set_ or [], only or [], skip or [], device, gpus, search, whole, plot
    )
    return fitting.show_fit(request, as_json=json)


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
        int | None,
        typer.Option("--seed", metavar="N", min=0, help="Seed of the order of interleaved arms."),
    ] = None,
    block_retries: Annotated[
        int,
        typer.Option(
            "--block-retries",
            metavar="N",
            min=0,
            help="How often a block is started again after a fault.",
        ),
    ] = 2,
    until_decided: Annotated[
        bool,
        typer.Option(
            "--until-decided", help="Add blocks of the arms until --budget decides or is spent."
        ),
    ] = False,
    budget: BudgetOption = None,
    policy: PolicyOption = None,
    force: Annotated[bool, typer.Option("--force", help="Run finished cells again.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run failed cells again.")
    ] = False,
    max_failures: Annotated[
        int | None,
        typer.Option("--max-failures", metavar="N", min=1, help="Stop after N failed runs."),
    ] = None,
    launcher: LauncherOption = "local",
    launcher_option: LauncherSetOption = None,
    profile: ProfileOption = None,
    slurm: SlurmOption = None,
    max_jobs: Annotated[
        int | None,
        typer.Option("--max-jobs", metavar="N", min=1, help="Jobs that run at the same time."),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Write the report and print its path at the end.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Run what is missing of a sweep.

    Finished runs of the same configuration and code are kept. The table of results goes to
    stdout, progress and remarks to stderr.
    """
    from bench.cli import launchers, planning, running

    arms = tuple(arm or ())
    seconds = running.budget_seconds(until_decided, budget, policy, repeat)
    interleave = interleave or until_decided
    jobs = launchers.LauncherRequest(
        launcher,
        profile,
        tuple(slurm or ()),
        max_jobs,
        tuple(launcher_option or ()),
    )
    request = planning.Request(
        sweep,
        set_ or [],
        only or [],
        skip or [],
        repeat,
        arms,
        interleave,
        jobs,
    )
    options = running.Options(
        results,
        force,
        retry_failed,
        max_failures,
        report,
        json,
        block_retries,
        seed,
        seconds,
        policy,
    )
    return running.run_sweep(request, options)


def cancel(
    sweep: Annotated[
        str, typer.Argument(metavar="SWEEP", autocompletion=completing.sweeps, help="A sweep id.")
    ],
    *,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """End the jobs of a sweep on a cluster.

    Those that wait and those that run. Returns when they are gone and every run has its record.
    What runs here is ended by Ctrl-C.
    """
    from bench.cli import cancelling

    return cancelling.cancel_jobs(results, sweep, as_json=json)
