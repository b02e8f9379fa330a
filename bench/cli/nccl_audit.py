"""`nccl`: the command line in front of `reports.nccl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.cli import console, exit_codes
from bench.cli.kernel_requirements import show_requirements
from bench.cli.planning import find_sweep_file
from bench.errors import NothingMeasuredError, UsageError
from reports.nccl.audit import Audit, audit_paths
from reports.nccl.requirement import (
    Conditions,
    Result,
    judge,
    parse_requirements,
    profile,
)

FORMATS = ("table", "json", "md")


def show_audit(
    logs: Sequence[str],
    *,
    require: str | None,
    topology: str | None,
    conditions: Conditions,
    form: str,
    junit: Path | None,
    results_folder: Path,
) -> int:
    """Print the audit; the exit code says whether the requirements are met.

    Raises:
        UsageError: a path that cannot be read, or an option that means nothing.
    """
    if form not in FORMATS:
        raise UsageError(f"--format: expected one of {', '.join(FORMATS)}, found {form!r}")
    requirements = () if topology is None else profile(topology)
    requirements += () if require is None else parse_requirements(require)
    if junit is not None and not requirements:
        raise UsageError("--junit writes the results of requirements; give --require or --profile")
    if conditions.after_iteration is not None and not requirements:
        raise UsageError("--after-iteration narrows requirements; give --require or --profile")
    sweep = None if len(logs) != 1 or Path(logs[0]).is_dir() else find_sweep_file(Path(logs[0]))
    if sweep is not None and (sweep.suffix == ".yaml" or not Path(logs[0]).exists()):
        if requirements or junit is not None or form == "md":
            raise UsageError(f"{logs[0]} is a sweep, whose requirements stand in it: name it alone")
        return show_requirements(sweep, results_folder, as_json=form == "json")
    audit = _audit(logs)
    results = judge(audit, requirements, conditions)
    _print(audit, results, form)
    if junit is not None:
        from reports.nccl.presentation import to_junit

        console.write_file(junit, to_junit(results))
    return _code(audit, results)


def _audit(logs: Sequence[str]) -> Audit:
    """Of the folder of a run of ours with all it recorded, or of any logs."""
    if len(logs) == 1 and (Path(logs[0]) / "spec.json").is_file():
        from reports.nccl.audit import audit_run

        found = audit_run(Path(logs[0]))
        if found.audit is None:
            raise NothingMeasuredError(found.text)
        return found.audit
    return audit_paths(logs)


def _print(audit: Audit, results: Sequence[Result], form: str) -> None:
    if form == "json":
        from reports.nccl.presentation import to_data

        console.data_json(to_data(audit, results))
        return
    from reports.nccl.presentation import to_markdown, to_terminal

    write = to_markdown if form == "md" else to_terminal
    console.data(write(audit, results).rstrip("\n"))


def _code(audit: Audit, results: Sequence[Result]) -> int:
    for one in results:
        if one.state != "met":
            word = "without evidence" if one.state == "no evidence" else "not met"
            console.note(f"requirement {word}: {one.requirement.text}: {one.message}")
    if any(one.state != "met" for one in results):
        return exit_codes.REQUIREMENT_NOT_MET
    if not audit.rows:
        console.note(
            "nothing to judge: no line of these logs tells which kernel ran or which collective was"
            " called; run with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,TUNING,COLL,REG"
        )
        return exit_codes.NOTHING_MEASURED
    return exit_codes.OK
