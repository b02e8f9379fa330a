"""`plan`, `fit` and `run`."""

from __future__ import annotations

from pathlib import Path

from bench.cli.completion import offer_definitions
from bench.cli.options import (
    BUDGET,
    RESULTS,
    CellsRequest,
    MachineRequest,
    SweepRequest,
    argument,
    option,
    verb,
)


@verb(
    "plan",
    "planning.show_plan",
    "plan quickstart",
    "plan my.yaml --only engine.name=mfsdp --set train.steps=50",
)
class PlanRequest:
    """Show the cells of a sweep, and why others are pruned.

    Starts no process. SWEEP is a file, or the name of a sweep that comes with the tool. With
    --device and --gpus the plan is for such a machine, with all optional packages.
    """

    wanted: SweepRequest
    machine: MachineRequest = MachineRequest()


@verb(
    "fit",
    "fitting.show_fit",
    "fit --model llama3-8b --device H100 --gpus 64",
    "fit --model llama3-70b --device H100 --gpus 256 --search",
    "fit my.yaml --only engine.name=mfsdp",
)
class FitRequest:
    """Say what each rank would hold and send, without running.

    The engine's own code runs on tensors without contents. With --device and --gpus it says
    whether that fits; a model alone needs both.
    """

    sweep: Path | None = argument(
        "SWEEP",
        "A sweep file, or the name of a sweep that comes with the tool.",
        None,
        offer_definitions,
    )
    model: str | None = option("--model PRESET|config.json", "A model instead of a sweep.")
    cells: CellsRequest = CellsRequest()
    machine: MachineRequest = MachineRequest()
    search: bool = option("--search", "Try GPUs and switches; rank what fits by its cost.", False)
    whole: bool = option("--whole", "Trace every layer, not a few of those that repeat.", False)


@verb(
    "run",
    "running.run_sweep",
    "run quickstart --report",
    "run my.yaml --repeat 3",
    "run my.yaml --arm base=main --arm head=. --interleave --repeat 8",
    "run my.yaml --launcher command --launcher-option hosts=hosts.txt",
)
class RunRequest:
    """Run what is missing of a sweep.

    Finished runs of the same configuration and code are kept. The table of results goes to
    stdout, progress and remarks to stderr. With --budget, blocks of the arms are added until the
    time is spent.
    """

    wanted: SweepRequest
    block_retries: int = option(
        "--block-retries N", "How often a block is started again after a fault.", 2, min=0
    )
    budget: str | None = BUDGET
    force: bool = option("--force", "Run finished cells again.", False)
    retry_failed: bool = option("--retry-failed", "Run failed cells again.", False)
    max_failures: int | None = option("--max-failures N", "Stop after N failed runs.", min=1)
    report: bool = option("--report", "Write the report and print its path at the end.", False)
    results: Path = RESULTS
