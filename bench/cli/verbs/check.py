"""`validate`, `nccl`, `doctor` and `schema`: engines, logs and the machine looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from bench.cli.options import RESULTS, argument, option, verb


@verb(
    "validate",
    "validating.run_validation",
    "validate",
    "validate fsdp2 ddp --full",
)
class ValidationRequest:
    """Check engines against plain torch, case by case.

    Gradients, weights, bytes on the wire and memory are checked.
    """

    engines: tuple[str, ...] = argument(
        "ENGINE", "mfsdp (if left out), another engine, or package.module:factory.", ()
    )
    full: bool = option("--full", "All cases, not only those that touch every axis.", False)
    ranks: int | None = option("--ranks N", "Ranks at most; 4 on a CPU if left out.", min=1, max=64)
    patterns: tuple[str, ...] = option("--case PATTERN", "Cases whose id matches.", ())
    case_seconds: float = option(
        "--case-seconds N", "Time after which a case counts as hung.", 30.0, min=1
    )
    fuzz: int | None = option("--fuzz N", "Run N random training programs instead of cases.", min=1)
    seed: int = option("--seed S", "Of the random programs.", 0)
    list_only: bool = option("--list", "Print the ids of the cases.", False)
    results: Path = RESULTS


@verb(
    "nccl",
    "nccl_audit.show_audit",
    "nccl job.log",
    "nccl logs/ --require AG=sym,RS=sym --junit nccl.xml",
)
class AuditRequest:
    """Say which NCCL kernel ran for each collective.

    Where it was not the symmetric one, it says why.
    """

    logs: tuple[str, ...] = argument(
        "LOG", "Files, folders, a run's folder, - for stdin, or a sweep with requirements."
    )
    results: Path = RESULTS
    require: str | None = option("--require OP=KIND,...", "Fail unless met, as AG=sym,RS=sym.")
    profile: str | None = option("--profile NAME", "The requirements of a topology.")
    after_iteration: int | None = option(
        "--after-iteration N", "Judge only what follows iteration N.", min=0
    )
    min_bytes: int = option("--min-bytes N", "Judge only messages of at least N bytes.", 0, min=0)
    form: Literal["table", "md"] = option("--format", "How to print.", "table")
    junit: Path | None = option("--junit FILE", "Write the requirements' results as JUnit.")


@verb("doctor", "diagnosis.show_diagnosis", "doctor")
class DoctorRequest:
    """Say what this machine can run, and what is missing."""

    results: Path = RESULTS


@verb("schema", "planning.show_schema", "schema > sweep.schema.json")
class SchemaRequest:
    """Print the JSON Schema of a sweep file."""
