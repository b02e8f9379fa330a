"""`validate`, `nccl`, `doctor` and `schema`: engines, logs and the machine looked at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.cli.options import DEFAULT_RESULTS, Results


@dataclass(frozen=True, kw_only=True)
class ValidationRequest:
    """Check engines against plain torch, case by case.

    Gradients, weights, bytes on the wire and memory are checked.
    """

    engines: Annotated[
        tuple[str, ...],
        typer.Argument(
            metavar="ENGINE",
            help="mfsdp (if left out), another engine, or package.module:factory.",
        ),
    ] = ()
    full: Annotated[
        bool, typer.Option("--full", help="All cases, not only those that touch every axis.")
    ] = False
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", metavar="N", min=1, max=64, help="Ranks at most; 4 on a CPU if left out."
        ),
    ] = None
    patterns: Annotated[
        tuple[str, ...],
        typer.Option("--case", metavar="PATTERN", help="Cases whose id matches."),
    ] = ()
    inject: Annotated[
        str | None,
        typer.Option(
            "--inject", metavar="R1,...|all|FILE.patch", help="Put bugs into the core first."
        ),
    ] = None
    case_seconds: Annotated[
        float,
        typer.Option(
            "--case-seconds", metavar="N", min=1, help="Time after which a case counts as hung."
        ),
    ] = 30.0
    fuzz: Annotated[
        int | None,
        typer.Option(
            "--fuzz", metavar="N", min=1, help="Run N random training programs instead of cases."
        ),
    ] = None
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Of the random programs.")] = 0
    list_only: Annotated[bool, typer.Option("--list", help="Print the ids of the cases.")] = False
    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """Say which NCCL kernel ran for each collective.

    Where it was not the symmetric one, it says why.
    """

    logs: Annotated[
        tuple[str, ...],
        typer.Argument(
            metavar="LOG",
            help="Files, folders, a run's folder, - for stdin, or a sweep with requirements.",
        ),
    ]
    results: Results = DEFAULT_RESULTS
    require: Annotated[
        str | None,
        typer.Option("--require", metavar="OP=KIND,...", help="Fail unless met, as AG=sym,RS=sym."),
    ] = None
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="NAME", help="The requirements of a topology."),
    ] = None
    after_iteration: Annotated[
        int | None,
        typer.Option(
            "--after-iteration", metavar="N", min=0, help="Judge only what follows iteration N."
        ),
    ] = None
    min_bytes: Annotated[
        int,
        typer.Option(
            "--min-bytes", metavar="N", min=0, help="Judge only messages of at least N bytes."
        ),
    ] = 0
    form: Annotated[Literal["table", "md"], typer.Option("--format", help="How to print.")] = (
        "table"
    )
    junit: Annotated[
        Path | None,
        typer.Option("--junit", metavar="FILE", help="Write the requirements' results as JUnit."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """Say what this machine can run, and what is missing."""

    results: Results = DEFAULT_RESULTS


@dataclass(frozen=True, kw_only=True)
class SchemaRequest:
    """Print the JSON Schema of a sweep file or of a run."""

    what: Annotated[
        Literal["sweep", "run"], typer.Argument(metavar="sweep|run", help="Which document.")
    ] = "sweep"
