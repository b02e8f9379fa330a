"""`plan`, `fit`, `run` and `cancel`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from bench.cli import completing
from bench.cli.options import (
    DEFAULT_RESULTS,
    Budget,
    CellsRequest,
    MachineRequest,
    Policy,
    Results,
    SweepId,
    SweepRequest,
)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Show the cells of a sweep, and why others are pruned.

    Starts no process. SWEEP is a file, or the name of a sweep that comes with the tool. With
    --device and --gpus the plan is for such a machine, with all optional packages.
    """

    wanted: SweepRequest
    machine: MachineRequest = field(default_factory=MachineRequest)


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """Say what each rank would hold and send, without running.

    The engine's own code runs on tensors without contents. With --device and --gpus it says
    whether that fits; a model alone needs both.
    """

    sweep: Annotated[
        Path | None,
        typer.Argument(
            metavar="SWEEP",
            autocompletion=completing.sweep_files,
            help="A sweep file, or the name of a sweep that comes with the tool.",
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PRESET|config.json", help="A model instead of a sweep."),
    ] = None
    cells: CellsRequest = field(default_factory=CellsRequest)
    machine: MachineRequest = field(default_factory=MachineRequest)
    search: Annotated[
        bool, typer.Option("--search", help="Try GPUs and switches; rank what fits by its cost.")
    ] = False
    whole: Annotated[
        bool, typer.Option("--whole", help="Trace every layer, not a few of those that repeat.")
    ] = False
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the memory of a step (--model)."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Run what is missing of a sweep.

    Finished runs of the same configuration and code are kept. The table of results goes to
    stdout, progress and remarks to stderr. With --budget, blocks of the arms are added until
    every comparison that the policy requires is decided, or the time is spent.
    """

    wanted: SweepRequest
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", min=0, help="Seed of the order of interleaved arms."),
    ] = None
    block_retries: Annotated[
        int,
        typer.Option(
            "--block-retries",
            metavar="N",
            min=0,
            help="How often a block is started again after a fault.",
        ),
    ] = 2
    budget: Budget = None
    policy: Policy = None
    force: Annotated[bool, typer.Option("--force", help="Run finished cells again.")] = False
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run failed cells again.")
    ] = False
    max_failures: Annotated[
        int | None,
        typer.Option("--max-failures", metavar="N", min=1, help="Stop after N failed runs."),
    ] = None
    report: Annotated[
        bool, typer.Option("--report", help="Write the report and print its path at the end.")
    ] = False
    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class CancelRequest:
    """End the jobs of a sweep on a cluster.

    Those that wait and those that run. Returns when they are gone and every run has its record.
    What runs here is ended by Ctrl-C.
    """

    sweep: SweepId
    results: Results = DEFAULT_RESULTS
