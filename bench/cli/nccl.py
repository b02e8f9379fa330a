"""`nccl`: the logs that are named, or what a sweep file requires of the logs of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bench.cli import console, exit_codes
from bench.cli.verb import Answer, ResultsOption, argument, columns, option
from bench.errors import NothingMeasuredError, UsageError
from reports.renderers.document import Heading

if TYPE_CHECKING:
    from bench.store import ResultsStore
    from reports.nccl.verdicts import Audit, Result
    from sweeps.matrix import MatrixCell
    from sweeps.schema import RequireSection

_COLUMNS = ("cell", "requirement", "state", "message", "run")
_NEVER = "never measured"
_NOTHING = (
    "nothing to judge: no line of these logs tells which kernel ran or which collective was"
    " called; run with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,TUNING,COLL,REG"
)


class NcclVerb(ResultsOption, name="nccl"):
    """Say which NCCL kernel ran for each collective.

    Where it was not the symmetric one, it says why.

    Examples:
        nccl job.log
        nccl logs/ --require AG=sym,RS=sym --junit nccl.xml
    """

    logs: tuple[str, ...] = argument(
        "LOG", "Files, folders, a run's folder, - for stdin, or a sweep with requirements."
    )
    require: str | None = option("--require OP=KIND,...", "Fail unless met, as AG=sym,RS=sym.")
    profile: str | None = option("--profile NAME", "The requirements of a topology.")
    after_iteration: int | None = option(
        "--after-iteration N", "Judge only what follows iteration N.", min=0
    )
    min_bytes: int = option("--min-bytes N", "Judge only messages of at least N bytes.", 0, min=0)
    form: Literal["table", "md"] = option("--format", "How to print.", "table")
    junit: Path | None = option("--junit FILE", "Write the requirements' results as JUnit.")

    def run(self) -> Answer:
        """The audit; 1 where a requirement is not met, 3 where the logs say nothing."""
        from reports.nccl import presentation
        from reports.nccl.audit import audit_paths, audit_run
        from reports.nccl.verdicts import judge, parse_requirements, profile
        from sweeps.selected_sweep import find_sweep_file

        requirements = () if self.profile is None else profile(self.profile)
        requirements += () if self.require is None else parse_requirements(self.require)
        if not requirements:
            for name, given in (
                ("--junit", self.junit),
                ("--after-iteration", self.after_iteration),
            ):
                if given is not None:
                    raise UsageError(f"{name} is about requirements; give --require or --profile")
        first = Path(self.logs[0])
        is_one = len(self.logs) == 1
        sweep = find_sweep_file(first) if is_one and not first.is_dir() else None
        if sweep is not None and (sweep.suffix == ".yaml" or not first.exists()):
            if requirements or self.form == "md":
                raise UsageError(
                    f"{first} is a sweep, whose requirements stand in it: name it alone"
                )
            return self._of_sweep(sweep)
        is_run = is_one and (first / "spec.json").is_file()  # with all that a run of ours recorded
        audit = audit_run(first) if is_run else audit_paths(self.logs)
        results = judge(audit, requirements, self.after_iteration, self.min_bytes)
        if self.junit is not None:
            console.write_file(self.junit, presentation.to_junit(results))
        title = [Heading("NCCL audit", level=2)] if self.form == "md" else []
        return Answer(
            [*title, *presentation.audit_blocks(audit, results)],
            presentation.to_data(audit, results),
            *_ending(audit, results),
        )

    def _of_sweep(self, sweep: Path) -> Answer:
        """Judge the newest finished run of every cell that something is required of.

        Raises:
            UsageError: the file requires nothing, or something that means nothing.
        """
        from bench.store import ResultsStore
        from reports.nccl.verdicts import parse_requirements
        from sweeps.definition import load_sweep
        from sweeps.matrix import expand

        definition = load_sweep(sweep)
        if not definition.require:
            raise UsageError(
                f"{sweep} requires nothing of NCCL's logs: it has no `require` section"
            )
        for _, required in definition.require:
            parse_requirements(required.nccl)
        store = ResultsStore(self.results)
        judged = [
            row
            for cell in expand(definition.matrix)
            for when, required in definition.require
            if when.matches(cell)
            for row in _judge(store, definition.name, cell, required)
        ]
        states = {state for _, _, state, _, _ in judged}
        met = exit_codes.OK if states <= {"met"} else exit_codes.REQUIREMENT_NOT_MET
        return Answer(
            [columns(_COLUMNS, judged)],
            {"requirements": [dict(zip(_COLUMNS, row, strict=True)) for row in judged]},
            exit_codes.NOTHING_MEASURED if states <= {_NEVER} else met,
        )


def _ending(audit: Audit, results: Sequence[Result]) -> tuple[int, tuple[str, ...]]:
    unmet = [result for result in results if result.state != "met"]
    if unmet:
        words = {"no evidence": "without evidence"}
        return exit_codes.REQUIREMENT_NOT_MET, tuple(
            f"requirement {words.get(result.state, 'not met')}: {result.requirement.text}:"
            f" {result.message}"
            for result in unmet
        )
    if not audit.rows and not audit.job.times.rows():
        return exit_codes.NOTHING_MEASURED, (_NOTHING,)
    return exit_codes.OK, ()


def _judge(
    store: ResultsStore, sweep: str, cell: MatrixCell, required: RequireSection
) -> list[tuple[str, ...]]:
    """A row of each term, of `_COLUMNS`."""
    from reports.nccl.audit import audit_run
    from reports.nccl.verdicts import judge, parse_requirements

    wanted = parse_requirements(required.nccl)
    run, folder, why = _newest(store, sweep, cell)
    if folder is None:
        return [(cell.id, term.text, _NEVER, why, run) for term in wanted]
    try:
        audit = audit_run(folder)
    except NothingMeasuredError as error:
        return [(cell.id, term.text, "no evidence", str(error), run) for term in wanted]
    return [
        (cell.id, result.requirement.text, result.state, result.message, run)
        for result in judge(audit, wanted, required.after_iteration, required.min_bytes)
    ]


def _newest(store: ResultsStore, sweep: str, cell: MatrixCell) -> tuple[str, Path | None, str]:
    """Id and folder of the run that counts, or why there is none."""
    from bench.resolve.resolution import resolve_anywhere

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
