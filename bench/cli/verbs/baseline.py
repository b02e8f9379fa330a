"""`baseline save`, `baseline list` and `baseline promote`."""

from __future__ import annotations

from typing import Annotated

import typer

from bench.cli import completing
from bench.cli.options import DEFAULT_RESULTS, JsonOption, ResultsOption


def save(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A new name.")],
    sweep: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP", autocompletion=completing.sweeps, help="A sweep that was run."
        ),
    ],
    *,
    arm: Annotated[
        str | None,
        typer.Option("--arm", metavar="ARM", autocompletion=completing.arms, help="One arm of it."),
    ] = None,
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Keep the numbers of a sweep as a small JSON file."""
    from bench.cli import baselines

    return baselines.save(results, name, sweep, arm=arm, as_json=json)


def show_list(*, results: ResultsOption = DEFAULT_RESULTS, json: JsonOption = False) -> int:
    """Show every baseline with its age and hardware."""
    from bench.cli import baselines

    return baselines.show_list(results, as_json=json)


def promote(
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="A baseline, or its file.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name it takes over.")],
    *,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Kept in its history.")
    ] = "",
    results: ResultsOption = DEFAULT_RESULTS,
    json: JsonOption = False,
) -> int:
    """Let one baseline take the place of another.

    The change is written into its history.
    """
    from bench.cli import baselines

    return baselines.promote_to(results, candidate, name, why=reason, as_json=json)
