"""Arguments and options that more than one verb takes. Only typer is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from bench.cli import completing

DEFAULT_RESULTS = Path("results")
LOCAL = "local"

SweepFile = Annotated[
    Path,
    typer.Argument(
        metavar="SWEEP",
        autocompletion=completing.sweep_files,
        help="A sweep file, or the name of a sweep that comes with the tool.",
    ),
]
SweepId = Annotated[
    str, typer.Argument(metavar="SWEEP", autocompletion=completing.sweeps, help="A sweep id.")
]
SweepIds = Annotated[
    tuple[str, ...],
    typer.Argument(
        metavar="SWEEP",
        autocompletion=completing.sweeps,
        help="Sweep ids; all if left out.",
    ),
]
RunId = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run id, a unique part of one, or SWEEP:CELL."),
]
Results = Annotated[Path, typer.Option("--results", metavar="FOLDER", help="The results folder.")]
Repeat = Annotated[
    int | None,
    typer.Option("--repeat", metavar="N", min=1, max=1000, help="Runs of each cell."),
]
Arms = Annotated[
    tuple[str, ...],
    typer.Option(
        "--arm",
        metavar="NAME=WHAT",
        help="One side of a comparison; give two or more. WHAT is a git ref, . (the working"
        " tree), or pairs git: repo: checkout: python: packages: with commas between.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="TIME",
        help="Add blocks of the arms until all is decided, at most so long, as 10m or 90s.",
    ),
]
Policy = Annotated[
    Path | None,
    typer.Option("--policy", metavar="FILE.yaml", help="Tolerances and requirements."),
]


@dataclass(frozen=True, kw_only=True)
class CellsRequest:
    """Settings of all cells of a sweep, and which cells are wanted."""

    assignments: Annotated[
        tuple[str, ...],
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Fix a setting in every cell, as train.steps=50."
        ),
    ] = ()
    only: Annotated[
        tuple[str, ...],
        typer.Option(
            "--only", metavar="EXPR", help="Keep matching cells only: KEY=PATTERN[|PATTERN][,...]."
        ),
    ] = ()
    skip: Annotated[
        tuple[str, ...],
        typer.Option("--skip", metavar="EXPR", help="Leave matching cells out."),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class LauncherRequest:
    """What makes the runs. options: KEY=VALUE."""

    name: Annotated[
        str,
        typer.Option(
            "--launcher",
            metavar="NAME",
            help="Where runs are made: local, in Slurm jobs (slurm), or on hosts that a command"
            " reaches (command)."
            " A launcher of your own is package.module:NAME.",
        ),
    ] = LOCAL
    options: Annotated[
        tuple[str, ...],
        typer.Option(
            "--launcher-option",
            metavar="KEY=VALUE",
            help="A setting of the launcher, as partition=gpu; a profile of"
            " ~/.config/mfsdp-bench/slurm.yaml is profile=NAME.",
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """What the command line says about a sweep."""

    sweep: SweepFile
    cells: CellsRequest = field(default_factory=CellsRequest)
    repeat: Repeat = None
    arms: Arms = ()
    interleave: Annotated[
        bool, typer.Option("--interleave", help="Run the arms in turn, block by block.")
    ] = False
    launcher: LauncherRequest = field(default_factory=LauncherRequest)


@dataclass(frozen=True, kw_only=True)
class MachineRequest:
    """A machine that is not this one."""

    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="Plan for GPUs of this name, as H100."),
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", metavar="N", min=1, max=4096, help="So many of --device, 8 in a node."
        ),
    ] = None
