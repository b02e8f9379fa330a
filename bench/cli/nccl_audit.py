"""`nccl`: the command line in front of `reports.nccl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.cli import console, exit_codes
from bench.cli.answer import Answer
from bench.cli.chosen_sweep import find_sweep_file
from bench.cli.kernel_requirements import show_requirements
from bench.cli.verbs.check import AuditRequest
from bench.errors import NothingMeasuredError, UsageError
from reports.nccl import presentation
from reports.nccl.audit import Audit, audit_paths, audit_run
from reports.nccl.requirement import (
    Result,
    judge,
    parse_requirements,
    profile,
)

_NOTHING = (
    "nothing to judge: no line of these logs tells which kernel ran or which collective was"
    " called; run with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,TUNING,COLL,REG"
)


def show_audit(asked: AuditRequest) -> Answer:
    """The audit; the exit code says whether the requirements are met.

    Raises:
        UsageError: a path that cannot be read, or an option that means nothing.
    """
    logs = asked.logs
    requirements = () if asked.profile is None else profile(asked.profile)
    requirements += () if asked.require is None else parse_requirements(asked.require)
    if not requirements:
        for option, given in (
            ("--junit", asked.junit),
            ("--after-iteration", asked.after_iteration),
        ):
            if given is not None:
                raise UsageError(f"{option} is about requirements; give --require or --profile")
    sweep = None if len(logs) != 1 or Path(logs[0]).is_dir() else find_sweep_file(Path(logs[0]))
    if sweep is not None and (sweep.suffix == ".yaml" or not Path(logs[0]).exists()):
        if requirements or asked.form == "md":
            raise UsageError(f"{logs[0]} is a sweep, whose requirements stand in it: name it alone")
        return show_requirements(sweep, asked.results)
    audit = _audit(logs)
    found = judge(audit, requirements, asked.after_iteration, asked.min_bytes)
    write = presentation.to_markdown if asked.form == "md" else presentation.to_terminal
    if asked.junit is not None:
        console.write_file(asked.junit, presentation.to_junit(found))
    code, remarks = _ending(audit, found)
    return Answer(
        lambda: presentation.to_data(audit, found), lambda: write(audit, found), code, remarks
    )


def _audit(logs: Sequence[str]) -> Audit:
    """Of the folder of a run of ours with all it recorded, or of any logs."""
    if len(logs) == 1 and (Path(logs[0]) / "spec.json").is_file():
        found = audit_run(Path(logs[0]))
        if found.audit is None:
            raise NothingMeasuredError(found.text)
        return found.audit
    return audit_paths(logs)


def _ending(audit: Audit, results: Sequence[Result]) -> tuple[int, tuple[str, ...]]:
    unmet = [one for one in results if one.state != "met"]
    if unmet:
        words = {"no evidence": "without evidence"}
        return exit_codes.REQUIREMENT_NOT_MET, tuple(
            f"requirement {words.get(one.state, 'not met')}: {one.requirement.text}: {one.message}"
            for one in unmet
        )
    if not audit.rows:
        return exit_codes.NOTHING_MEASURED, (_NOTHING,)
    return exit_codes.OK, ()
