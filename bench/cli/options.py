"""Arguments and options that more than one verb takes. Only typer is imported here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.cli import completing

DEFAULT_RESULTS = Path("results")

SweepFileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="SWEEP",
        autocompletion=completing.sweep_files,
        help="A sweep file, or the name of a sweep that comes with the tool.",
    ),
]
SweepsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SWEEP]...",
        autocompletion=completing.sweeps,
        help="Sweep ids; all if left out.",
    ),
]
OptionalSweepArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[SWEEP]",
        autocompletion=completing.sweep_files,
        help="A sweep file, or the name of a sweep that comes with the tool.",
    ),
]
ResultsOption = Annotated[
    Path, typer.Option("--results", metavar="FOLDER", help="The results folder.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Fix a setting in every cell, as train.steps=50."
    ),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="EXPR", help="Keep matching cells only: KEY=PATTERN[|PATTERN][,...]."
    ),
]
SkipOption = Annotated[
    list[str] | None, typer.Option("--skip", metavar="EXPR", help="Leave matching cells out.")
]
RepeatOption = Annotated[
    int | None,
    typer.Option("--repeat", metavar="N", min=1, max=1000, help="Runs of each cell."),
]
ArmOption = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        metavar="NAME=WHAT",
        help="One side of a comparison; give two or more. WHAT is a git ref, . (the working"
        " tree), or pairs git: repo: checkout: python: packages: with commas between.",
    ),
]
InterleaveOption = Annotated[
    bool, typer.Option("--interleave", help="Run the arms in turn, block by block.")
]
LauncherOption = Annotated[
    str,
    typer.Option(
        "--launcher",
        metavar="[local|slurm|command]",
        help="Where runs are made: here, in Slurm jobs, or on hosts that a command reaches."
        " A launcher of your own is package.module:NAME.",
    ),
]
LauncherSetOption = Annotated[
    list[str] | None,
    typer.Option("--launcher-option", metavar="KEY=VALUE", help="A setting of the launcher."),
]
ProfileOption = Annotated[
    str | None,
    typer.Option("--profile", metavar="NAME", help="Settings of ~/.config/mfsdp-bench/slurm.yaml."),
]
SlurmOption = Annotated[
    list[str] | None,
    typer.Option("--slurm", metavar="KEY=VALUE", help="A setting of jobs, as partition=gpu."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="Plan for GPUs of this name, as H100."),
]
GpusOption = Annotated[
    int | None,
    typer.Option("--gpus", metavar="N", min=1, max=4096, help="So many of --device, 8 in a node."),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="TIME",
        help="Add blocks until all is decided, at most so long, as 10m or 90s.",
    ),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run id, or a part of one that is unique.")
]
PolicyOption = Annotated[
    Path | None,
    typer.Option("--policy", metavar="FILE.yaml", help="Tolerances and requirements."),
]
