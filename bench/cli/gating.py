"""`gate`: verdicts by a policy, an exit code, and what CI systems want to read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.cli import console, exit_codes, running
from bench.cli.chosen_sweep import ChosenSweep, choose, find_sweep_file, sweep_file
from bench.cli.console import Answer
from bench.cli.importing import is_log, runs_of_log
from bench.cli.judged_sweep import JudgedSweep, expected_of, judged_sweep, read_policy
from bench.cli.options import SweepRequest, parsed_seconds
from bench.cli.verbs.judge import GateRequest
from bench.errors import UsageError
from bench.importers.labels import as_name
from bench.plan import Plan
from bench.store import ResultsStore
from bench.store.documents import read_document
from bench.store.run_folder import utc_now
from reports.compare import ci
from reports.compare import text as gate_text
from reports.compare.baseline import Baseline, make_baseline, read_baseline
from reports.compare.judge import Verdicts, judge
from reports.compare.noise import calibrations
from reports.compare.policy import Policy
from reports.compare.samples import imported_samples
from reports.compare.sides import (
    Sides,
    arms_of_sweep,
    checked,
    matching,
    sides_of_arms,
    sides_of_baseline,
    sides_of_sweeps,
    stated_sides,
    two_arms,
)
from sweeps.budget import BlockBudget
from sweeps.resume import RunOptions

_BASELINE = b'"baseline_version"'
_HEAD_BYTES = 4096


def run_gate(request: GateRequest) -> Answer:
    """Judge, and write what was asked for."""
    if request.against and request.baseline:
        raise UsageError("--against and --baseline both name what to compare with; give one")
    if (request.confirm or request.budget) and (request.against or request.baseline):
        option = "--budget" if request.budget else "--confirm"
        raise UsageError(f"{option} runs blocks of two arms; leave --against and --baseline out")
    if request.confirm and request.budget:
        raise UsageError("--budget runs blocks itself; leave --confirm out")
    policy = read_policy(request.policy)
    if is_log(request.sweep):
        return _answer(request, judge(_of_files(request), policy, lambda _: None))
    budget = None
    if request.budget is not None:
        sweep, budget = _measured(request, parsed_seconds(request.budget, "--budget"))
    store = ResultsStore.open(request.results, create=False)
    if budget is None:
        sweep = judged_sweep(store, request.sweep, request.arms)
    result = _judged(store, sweep, request, policy)
    if request.confirm and result.regressed:
        result = _confirmed(store, sweep, request, result)
    return _answer(request, result, budget)


def _answer(request: GateRequest, result: Verdicts, budget: BlockBudget | None = None) -> Answer:
    _write_files(result, request)
    annotations = ci.annotation_lines(result) if request.github else []
    code = gate_code(result, strict=request.strict)

    def document() -> dict[str, Any]:
        for line in annotations:  # GitHub reads them on either stream, and this one is JSON's
            console.note(line)
        found = gate_text.to_data(result) | {"exit_code": code}
        return found if budget is None else found | {"budget": budget.to_data()}

    return Answer(
        document,
        lambda: "\n".join([gate_text.to_terminal(result).rstrip("\n"), *annotations]),
        code,
        _remarks(result, request),
    )


def gate_code(result: Verdicts, *, strict: bool) -> int:
    """3 a cell without a number, 1 regressed, 5 nothing comparable, 4 undecided and strict."""
    codes = [exit_codes.OK]
    if result.failed:
        codes.append(exit_codes.NOTHING_MEASURED)
    if result.regressed:
        codes.append(exit_codes.REQUIREMENT_NOT_MET)
    if result.nothing_comparable and not result.failed:
        codes.append(exit_codes.NOT_COMPARABLE)
    if strict and result.undecided:
        codes.append(exit_codes.INCONCLUSIVE)
    return exit_codes.worst(codes)


def load_baseline(store: ResultsStore, named: str) -> Baseline:
    """A baseline by its name, or from a file of any place, ours or another project's.

    Raises:
        UsageError: there is none, or it is damaged.
        NotComparableError: it has another schema.
        NothingMeasuredError: a file without a run.
    """
    path = Path(named)
    if named in store.baselines.names() or not (path.is_file() or path.suffix == ".json"):
        return read_baseline(store.baselines.read(named), f"baseline {named}")
    if not path.is_file():
        return read_baseline(read_document(path, "baseline"), named)
    return _read_file(path, named)


def _of_files(request: GateRequest) -> Sides:
    """The runs of a file of CI, or of a log, against those of another one or a baseline."""
    named = request.baseline or request.against
    if named is None or request.only or request.base_arm or request.head_arm:
        raise UsageError(f"{request.sweep} is a file: compare it alone, with --baseline FILE|NAME")
    if Path(named).is_file():
        base = _read_file(Path(named), named)
    else:
        base = load_baseline(ResultsStore.open(request.results, create=False), named)
    head = Path(request.sweep)
    cells = baseline_of_file(head.stem, head).cells
    return stated_sides(f"baseline {base.name}", base.cells, request.sweep, cells)


def _read_file(path: Path, named: str) -> Baseline:
    if _BASELINE in path.read_bytes()[:_HEAD_BYTES]:
        return read_baseline(read_document(path, "baseline"), named)
    return baseline_of_file(path.stem, path)


def baseline_of_file(name: str, path: Path) -> Baseline:
    """Of a file of CI, or of any log, that `import` reads.

    Raises:
        UsageError: it cannot be read.
        NothingMeasuredError: it holds no run.
    """
    cells = [imported_samples(run) for run in runs_of_log(str(path))]
    return make_baseline(name, as_name(path.stem) or "file", utc_now(), cells)


def _judged(
    store: ResultsStore, sweep: JudgedSweep, request: GateRequest, policy: Policy
) -> Verdicts:
    arms: tuple[str | None, ...] = (request.head_arm,)
    codes = None if sweep.expected is None else sweep.expected.codes
    if request.baseline is not None:
        kept = load_baseline(store, request.baseline)
        named = store, kept.name, kept.cells, sweep.id, request.head_arm
        sides = sides_of_baseline(*named, codes=codes)
    elif request.against is not None:
        both = (request.base_arm, request.head_arm)
        sides = sides_of_sweeps(store, request.against, sweep.id, arms=both, codes=codes)
    else:
        arms = arms_of_sweep(store, sweep.id, request.base_arm, request.head_arm)
        sides = sides_of_arms(store, sweep.id, *arms, codes)
    if request.only:
        sides = sides.selected(request.only)
    if sweep.expected is not None:  # a file was named: annotations can point at it
        sides = replace(sides, source=str(sweep_file(Path(request.sweep))))
        sides = checked(sides, sweep.expected, arms, request.only)
    return judge(sides, policy, calibrations(store), any_nodes=request.any_nodes)


def _blocks_to_run(request: GateRequest, repeat: int | None = None) -> ChosenSweep:
    """The sweep with its arms in blocks, of the cells that are judged.

    Raises:
        UsageError: the sweep is named by its id, which says nothing of how to run it.
    """
    if find_sweep_file(Path(request.sweep)) is None:
        option, value = ("--confirm", "N") if request.confirm else ("--budget", "10m")
        raise UsageError(
            f"{option} runs blocks, so it needs the sweep file and its arms, found the id"
            f" {request.sweep!r}: gate SWEEP.yaml --arm base=GITREF --arm head=. {option} {value}"
        )
    wanted = SweepRequest(
        sweep=Path(request.sweep), arms=request.arms, repeat=repeat, interleave=True
    )
    sweep = choose(wanted)
    cells = [cell.id for cell in sweep.whole.cells]
    return sweep.only(matching(cells, request.only)) if request.only else sweep


def _measured(request: GateRequest, seconds: float) -> tuple[JudgedSweep, BlockBudget]:
    """Add blocks of the arms until the time is spent."""
    asked = _blocks_to_run(request)
    store = ResultsStore.open(request.results, create=True)
    asked = asked.prepared(store)
    names = [arm.name for arm in asked.whole.arms]
    two_arms(asked.id, names, request.base_arm, request.head_arm)  # before anything runs
    _, outcome, budget = running.run_within(asked, store, RunOptions(), seconds)
    if outcome.interrupted:
        raise KeyboardInterrupt
    stored = Plan.from_document(store.read_plan(asked.id))
    return JudgedSweep(stored.id, expected_of(asked, stored)), budget


def _confirmed(
    store: ResultsStore, sweep: JudgedSweep, request: GateRequest, result: Verdicts
) -> Verdicts:
    """Run `--confirm` more blocks and judge all blocks together; `result` if one is lost."""
    plan = Plan.from_document(store.read_plan(sweep.id))
    if not plan.interleaved:
        raise UsageError(
            f"--confirm runs more blocks, and {sweep.id} was not run with --interleave"
        )
    blocks = max((cell.repeats for cell in plan.cells), default=0) + request.confirm
    asked = _blocks_to_run(request, blocks)
    cells = f"{len(asked.chosen.cells)} of {len(asked.whole.cells)} cells"
    console.note(
        f"regressed; running {request.confirm} more blocks of {cells} before it is believed"
    )
    asked = asked.prepared(store)
    outcome = running.run_to_judge(asked, store)
    if running.outcome_code(asked.chosen, outcome) != exit_codes.OK:
        console.note("not every block of these has finished, so the regression stays as it was")
        return result
    return _judged(store, sweep, request, result.policy)


def _write_files(result: Verdicts, request: GateRequest) -> None:
    markdown = gate_text.to_markdown(result)
    if request.junit is not None:
        console.write_file(request.junit, ci.to_junit(result, strict=request.strict))
    if request.markdown is not None:
        console.write_file(request.markdown, markdown)
    if request.github:
        place = os.environ.get("GITHUB_STEP_SUMMARY")
        if place:
            _append(Path(place), markdown)


def _append(path: Path, markdown: str) -> None:
    try:
        size = path.stat().st_size if path.exists() else 0
        with path.open("a", encoding="utf-8") as stream:
            stream.write(ci.summary(markdown, size))
    except OSError as error:
        console.note(f"warning: the step summary {path} cannot be written: {error.strerror}")


def _remarks(result: Verdicts, request: GateRequest) -> tuple[str, ...]:
    remarks = []
    if result.undecided and not request.strict:
        count = len(result.of("inconclusive"))
        remarks.append(f"warning: {count} required comparisons are undecided (--strict makes it 4)")
    if result.failed and not result.judgements:
        reasons = "; ".join(f"{cell}: {why}" for cell, why in result.sides.failed[:5])
        remarks.append(f"error: nothing was measured: {reasons}")
    return tuple(remarks)
