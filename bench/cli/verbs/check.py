"""`validate`, `nccl`, `doctor` and `schema`: engines, logs and the machine looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.cli.options import (
    DEFAULT_RESULTS,
    JsonOption,
    ResultsOption,
)
from bench.errors import UsageError


def validate(  # noqa: PLR0913 - every option of the command line is a parameter
    engines: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ENGINE]...",
            help="mfsdp (if left out), another engine, or package.module:factory.",
        ),
    ] = None,
    *,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="All cases, or those that touch every axis.")
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", metavar="N", min=1, max=64, help="Ranks at most; 4 on a CPU if left out."
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", "--only", metavar="PATTERN", help="Cases whose id matches."),
    ] = None,
    inject: Annotated[
        str | None,
        typer.Option(
            "--inject", metavar="R1,...|all|FILE.patch", help="Put bugs into the core first."
        ),
    ] = None,
    case_seconds: Annotated[
        float,
        typer.Option(
            "--case-seconds", metavar="N", min=1, help="After which a case counts as hung."
        ),
    ] = 120.0,
    fuzz: Annotated[
        int | None,
        typer.Option(
            "--fuzz", metavar="N", min=1, help="Run N random training programs instead of cases."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Of the random programs.")] = 0,
    list_: Annotated[bool, typer.Option("--list", help="Print the ids of the cases.")] = False,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Check engines against plain torch, case by case.

    Gradients, weights, bytes on the wire and memory are checked.
    """
    from bench.cli import fuzzing, validating

    if fuzz is not None:
        if full or case or list_ or inject is not None:
            raise UsageError("--fuzz runs random programs: leave --full, --case, --inject, --list")
        return fuzzing.run_fuzz(results, tuple(engines or ()), fuzz, seed, as_json=json)
    request = validating.ValidationRequest(
        tuple(engines or ()), full, ranks, tuple(case or ()), inject, case_seconds, list_, json
    )
    return validating.run_validation(results, request)


def nccl(  # noqa: PLR0913 - every option of the command line is a parameter
    logs: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG...",
            help="Files, folders, a run's folder, - for stdin, or a sweep with requirements.",
        ),
    ],
    *,
    results: ResultsOption = DEFAULT_RESULTS,
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
        typer.Option(
            "--after-iteration", metavar="N", min=0, help="Judge only what follows iteration N."
        ),
    ] = None,
    min_bytes: Annotated[
        int,
        typer.Option(
            "--min-bytes", metavar="N", min=0, help="Judge only messages of at least N bytes."
        ),
    ] = 0,
    form: Annotated[str, typer.Option("--format", metavar="[table|json|md]")] = "table",
    junit: Annotated[
        Path | None,
        typer.Option("--junit", metavar="FILE", help="Write the requirements' results as JUnit."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Say which NCCL kernel ran for each collective.

    Where it was not the symmetric one, it says why.
    """
    from bench.cli import nccl_audit
    from reports.nccl.requirement import Conditions

    return nccl_audit.show_audit(
        logs,
        require=require,
        topology=profile,
        conditions=Conditions(after_iteration, min_bytes),
        form="json" if json else form,
        junit=junit,
        results_folder=results,
    )


def doctor(
    *,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Say what this machine can run, and what is missing."""
    from bench.cli import diagnosis

    return diagnosis.show_diagnosis(results, as_json=json)


def schema(
    what: Annotated[str, typer.Argument(metavar="[sweep|run]", help="Which document.")] = "sweep",
    *,
    json: JsonOption = False,  # noqa: ARG001 - accepted like everywhere; it is JSON anyway
) -> int:
    """Print the JSON Schema of a sweep file or of a run."""
    from bench.cli import schemas

    return schemas.show_schema(what)
