"""`baseline save`, `baseline list` and `baseline promote`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from bench.cli import completing
from bench.cli.options import DEFAULT_RESULTS, Results


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
