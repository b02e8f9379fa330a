"""`nccl SWEEP`: what a sweep file requires of its runs' NCCL logs, cell by cell."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bench.cli import console, exit_codes
from bench.cli.answer import Answer
from bench.errors import UsageError
from bench.resolve.resolution import resolve_anywhere
from bench.store import ResultsStore
from reports.nccl.audit import audit_run
from reports.nccl.requirement import judge, parse_requirements
from sweeps.definition import load_sweep
from sweeps.matrix import MatrixCell, expand
from sweeps.schema import RequireSection

_NEVER = "never measured"


class _Judged(NamedTuple):
    """One term of one cell. run: that was judged, "" where there is none."""

    cell: str
    requirement: str
    state: str
    message: str
    run: str


def show_requirements(sweep: Path, results: Path) -> Answer:
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
    found = audit_run(folder)
    if found.audit is None:
        return [_Judged(cell.id, term.text, "no evidence", found.text, run) for term in wanted]
    return [
        _Judged(cell.id, result.requirement.text, result.state, result.message, run)
        for result in judge(found.audit, wanted, one.after_iteration, one.min_bytes)
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
