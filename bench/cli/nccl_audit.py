"""`nccl`: the logs that are named, or what a sweep file requires of the logs of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.cli import console, exit_codes
from bench.cli.chosen_sweep import find_sweep_file
from bench.cli.console import Answer
from bench.cli.verbs.check import AuditRequest
from bench.errors import NothingMeasuredError, UsageError
from bench.resolve.resolution import resolve_anywhere
from bench.store import ResultsStore
from reports.nccl import presentation
from reports.nccl.audit import Audit, audit_paths, audit_run
from reports.nccl.requirement import (
    Result,
    judge,
    parse_requirements,
    profile,
)
from sweeps.definition import load_sweep
from sweeps.matrix import MatrixCell, expand
from sweeps.schema import RequireSection

_NEVER = "never measured"
_NOTHING = (
    "nothing to judge: no line of these logs tells which kernel ran or which collective was"
    " called; run with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,TUNING,COLL,REG"
)


class _Judged(NamedTuple):
    """One term of one cell. run: that was judged, "" where there is none."""

    cell: str
    requirement: str
    state: str
    message: str
    run: str


def show_audit(request: AuditRequest) -> Answer:
    """The audit; the exit code says whether the requirements are met.

    Raises:
        UsageError: a path that cannot be read, or an option that means nothing.
    """
    logs = request.logs
    requirements = () if request.profile is None else profile(request.profile)
    requirements += () if request.require is None else parse_requirements(request.require)
    if not requirements:
        for option, given in (
            ("--junit", request.junit),
            ("--after-iteration", request.after_iteration),
        ):
            if given is not None:
                raise UsageError(f"{option} is about requirements; give --require or --profile")
    sweep = None if len(logs) != 1 or Path(logs[0]).is_dir() else find_sweep_file(Path(logs[0]))
    if sweep is not None and (sweep.suffix == ".yaml" or not Path(logs[0]).exists()):
        if requirements or request.form == "md":
            raise UsageError(f"{logs[0]} is a sweep, whose requirements stand in it: name it alone")
        return _of_sweep(sweep, request.results)
    audit = _audit(logs)
    found = judge(audit, requirements, request.after_iteration, request.min_bytes)
    write = presentation.to_markdown if request.form == "md" else presentation.to_terminal
    if request.junit is not None:
        console.write_file(request.junit, presentation.to_junit(found))
    code, remarks = _ending(audit, found)
    return Answer(
        lambda: presentation.to_data(audit, found), lambda: write(audit, found), code, remarks
    )


def _audit(logs: Sequence[str]) -> Audit:
    """Of the folder of a run of ours with all it recorded, or of any logs."""
    if len(logs) == 1 and (Path(logs[0]) / "spec.json").is_file():
        return audit_run(Path(logs[0]))
    return audit_paths(logs)


def _ending(audit: Audit, results: Sequence[Result]) -> tuple[int, tuple[str, ...]]:
    unmet = [one for one in results if one.state != "met"]
    if unmet:
        words = {"no evidence": "without evidence"}
        return exit_codes.REQUIREMENT_NOT_MET, tuple(
            f"requirement {words.get(one.state, 'not met')}: {one.requirement.text}: {one.message}"
            for one in unmet
        )
    if not audit.rows and not audit.job.times.rows():
        return exit_codes.NOTHING_MEASURED, (_NOTHING,)
    return exit_codes.OK, ()


def _of_sweep(sweep: Path, results: Path) -> Answer:
    """Judge the newest finished run of every cell that something is required of.

    Raises:
        UsageError: the file requires nothing, or something that means nothing.
    """
    definition = load_sweep(sweep)
    if not definition.require:
        raise UsageError(f"{sweep} requires nothing of NCCL's logs: it has no `require` section")
    for _, one in definition.require:
        parse_requirements(one.nccl)
    store = ResultsStore(results)
    judged = [
        row
        for cell in expand(definition.matrix)
        for when, one in definition.require
        if when.matches(cell)
        for row in _judge(store, definition.name, cell, one)
    ]
    states = {row.state for row in judged}
    met = exit_codes.OK if states <= {"met"} else exit_codes.REQUIREMENT_NOT_MET
    return Answer(
        lambda: {"requirements": [row._asdict() for row in judged]},
        lambda: console.columns(_Judged._fields, judged),
        exit_codes.NOTHING_MEASURED if states <= {_NEVER} else met,
    )


def _judge(store: ResultsStore, sweep: str, cell: MatrixCell, one: RequireSection) -> list[_Judged]:
    wanted = parse_requirements(one.nccl)
    run, folder, why = _newest(store, sweep, cell)
    if folder is None:
        return [_Judged(cell.id, term.text, _NEVER, why, run) for term in wanted]
    try:
        audit = audit_run(folder)
    except NothingMeasuredError as error:
        return [_Judged(cell.id, term.text, "no evidence", str(error), run) for term in wanted]
    return [
        _Judged(cell.id, result.requirement.text, result.state, result.message, run)
        for result in judge(audit, wanted, one.after_iteration, one.min_bytes)
    ]


def _newest(store: ResultsStore, sweep: str, cell: MatrixCell) -> tuple[str, Path | None, str]:
    """Id and folder of the run that counts, or why there is none."""
    try:
        run, folder = store.find(f"{sweep}:{cell.id}")
        record = store.read(run)
    except UsageError as error:
        return "", None, str(error).splitlines()[0]
    if record.resolved.config_hash != resolve_anywhere(cell.spec).config_hash:
        return run, None, "its newest run has another configuration: run the sweep again"
    if record.status.state != "ok":
        return run, None, f"its newest run ended {record.status.state}: {record.status.reason}"
    return run, folder, ""
