"""`compare`, `gate` and `baseline`: verdicts, and what they rest on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from bench.cli.completion import offer_any, offer_definitions, offer_kept
from bench.cli.options import (
    ARMS,
    BUDGET,
    POLICY,
    RESULTS,
    CellsRequest,
    argument,
    option,
    verb,
)


@verb(
    "compare",
    "comparing.show_comparison",
    "compare quickstart:ddp-fp32 quickstart:mfsdp-optim-fp32",
    "compare speed --format md",
    "compare base.log head.log",
)
class CompareRequest:
    """Compare two sweeps, cells, runs or logs, or arms of a sweep.

    A cell is written SWEEP:CELL. Of a sweep file, what is asked for now must be what was
    measured: 3 if nothing was, 5 if an arm was other code.
    """

    base: str = argument(
        "BASE", "A sweep, cell or log to compare with, or a sweep file.", offer=offer_any
    )
    head: str | None = argument(
        "HEAD", "The sweep, cell or log to judge; left out: arms or runs of BASE.", None, offer_any
    )
    arms: tuple[str, ...] = ARMS
    ignore: tuple[str, ...] = option("--ignore PATH", "A setting or section to set aside.", ())
    policy: Path | None = POLICY
    form: Literal["table", "md", "refresh"] = option(
        "--format", "How to print; refresh: per metric of two imports, for golden values.", "table"
    )
    results: Path = RESULTS


@verb(
    "gate",
    "gating.run_gate",
    "gate my.yaml --arm base=main --arm head=. --junit gate.xml",
    "gate nightly --baseline main --strict",
)
class GateRequest:
    """Judge a sweep; the exit code is the verdict.

    It is compared with its other arm, with another sweep or with a baseline. With --budget, blocks
    of both arms are run first, until the time is spent. A sweep file and its arms are looked up as
    `run` does: what was measured must be what they are now. Exit codes: 0 passed, 1 regressed,
    3 a cell was not measured, 4 undecided (with --strict), 5 not comparable.
    """

    sweep: str = argument(
        "SWEEP",
        "A sweep id, a sweep file, an imported run, or a log or file of CI.",
        offer=offer_any,
    )
    arms: tuple[str, ...] = ARMS
    against: str | None = option("--against SWEEP", "Another sweep, or an imported run, as base.")
    baseline: str | None = option(
        "--baseline NAME|FILE", "A baseline, or a file: a baseline's, golden values, a log."
    )
    base_arm: str | None = option("--base ARM", "The arm to compare with.")
    head_arm: str | None = option("--head ARM", "The arm to judge.")
    policy: Path | None = POLICY
    confirm: int = option("--confirm N", "More blocks to run before it fails.", 0, min=0)
    budget: str | None = BUDGET
    only: tuple[str, ...] = option("--only CELL", "Judge this cell only: an id, or a pattern.", ())
    any_nodes: bool = option("--any-nodes", "Compare what different nodes have measured.", False)
    strict: bool = option("--strict", "Undecided is exit code 4.", False)
    junit: Path | None = option("--junit FILE", "Write JUnit XML.")
    markdown: Path | None = option("--markdown FILE", "Write Markdown.")
    github: bool = option("--github", "Annotations and the step summary of GitHub Actions.", False)
    results: Path = RESULTS


@verb("baseline noise", "baselines.run_noise", "baseline noise quickstart", "baseline noise")
class NoiseRequest:
    """Measure how far equal code seems to differ here (A/A).

    Without SWEEP, show what has been measured before.
    """

    sweep: Path | None = argument(
        "SWEEP", "What to calibrate with; none: show.", None, offer_definitions
    )
    repeat: int = option("--repeat N", "Blocks of two runs per cell.", 10, min=1, max=1000)
    cells: CellsRequest = CellsRequest()
    results: Path = RESULTS


@verb(
    "baseline save",
    "baselines.save",
    "baseline save main nightly",
    "baseline save golden golden_values_dev_dgx_h100.json",
)
class SaveRequest:
    """Keep the numbers of a sweep, or of another project's file, as a small JSON file."""

    name: str = argument("NAME", "A new name.")
    sweep: str = argument(
        "SWEEP|FILE", "A sweep that was run, or a file that `import` reads.", offer=offer_kept
    )
    arm: str | None = option("--arm ARM", "One arm of it.")
    results: Path = RESULTS


@verb("baseline list", "baselines.show_list", "baseline list")
class ListRequest:
    """Show every baseline with its date and hardware."""

    results: Path = RESULTS


@verb(
    "baseline promote",
    "baselines.promote_to",
    "baseline promote candidate main",
)
class PromoteRequest:
    """Let one baseline take the place of another."""

    candidate: str = argument("CANDIDATE", "A baseline, or its file.")
    name: str = argument("NAME", "The name it takes over.")
    results: Path = RESULTS
