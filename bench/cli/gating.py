"""`gate`: verdicts by a policy, an exit code, and what CI systems want to read."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from bench.cli import console, exit_codes, running
from bench.cli.arm_preparation import prepared_sides
from bench.cli.budgeting import BlockBudget
from bench.cli.judged_sweep import JudgedSweep, Resolved, judged_sweep
from bench.cli.planning import (
    Request,
    RequestedPlan,
    find_sweep_file,
    requested_plan,
    sweep_file,
)
from bench.cli.policies import read_policy
from bench.errors import NothingMeasuredError, UsageError
from bench.store import ResultsStore
from bench.store.documents import read_document
from reports.gates import gate_text, github
from reports.gates.baseline import Baseline, read_baseline
from reports.gates.expected import checked
from reports.gates.gate import GateResult, gate
from reports.gates.junit import to_junit
from reports.gates.noise import calibrations
from reports.gates.pairing import (
    arms_of_sweep,
    matching,
    sides_of_arms,
    sides_of_baseline,
    sides_of_sweeps,
    two_arms,
)
from reports.gates.policy import Policy
from sweeps.plan import Plan


@dataclass(frozen=True)
class GateRequest:
    """What `gate` was asked for.

    budget_seconds: add blocks until all is decided, at most so long; None judges what is there.
    only: cells by id or pattern, () for all of them.

    sweep: an id, or a sweep file. arms: as for `run`, to find the sweep that was run with them.
    against, baseline, or neither: then two arms of the sweep, `base_arm` and `head_arm`.
    """

    sweep: str
    arms: tuple[str, ...] = ()
    against: str | None = None
    baseline: str | None = None
    base_arm: str | None = None
    head_arm: str | None = None
    policy: Path | None = None
    confirm: int = 0
    budget_seconds: float | None = None
    strict: bool = False
    junit: Path | None = None
    markdown: Path | None = None
    github: bool = False
    as_json: bool = False
    any_nodes: bool = False
    packed: bool = False
    only: tuple[str, ...] = ()


def run_gate(results: Path, request: GateRequest) -> int:
    """Judge, print, write what was asked for, and return the exit code."""
    if request.against and request.baseline:
        raise UsageError("--against and --baseline both name what to compare with; give one")
    if request.confirm and (request.against or request.baseline):
        raise UsageError("--confirm runs more blocks of two arms; it needs a sweep with arms")
    policy = read_policy(request.policy)
    if request.budget_seconds is None:
        store = ResultsStore.open(results, create=False, times_of_packed=request.packed)
        sweep, budget = judged_sweep(store, request.sweep, request.arms), None
    else:
        sweep, budget = _measured(results, request, policy)
        store = ResultsStore.open(results, create=False, times_of_packed=request.packed)
    result = _judged(store, sweep, request, policy)
    if request.confirm and result.regressed:
        result = _confirmed(results, store, sweep, request, result)
    now = datetime.now(UTC)
    if request.as_json:
        code = gate_code(result, strict=request.strict)
        more = {"exit_code": code} | ({} if budget is None else {"budget": budget.to_data()})
        console.data_json(gate_text.to_data(result, now) | more)
    else:
        console.data(gate_text.to_terminal(result, now).rstrip("\n"))
    _write_files(result, request, now)
    return _ending(result, request)


def gate_code(result: GateResult, *, strict: bool) -> int:
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
    """A baseline by its name, or from a JSON file of any place.

    Raises:
        UsageError: there is none, or it is damaged.
        NotComparableError: it has another schema.
    """
    path = Path(named)
    if path.suffix == ".json":
        return read_baseline(read_document(path, "baseline"), named)
    return read_baseline(store.baselines.read(named), f"baseline {named}")


def _judged(
    store: ResultsStore, sweep: JudgedSweep, request: GateRequest, policy: Policy
) -> GateResult:
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
    return gate(sides, policy, calibrations(store), any_nodes=request.any_nodes)


def _request(named: str, arms: tuple[str, ...]) -> Request:
    return Request(Path(named), [], [], [], None, arms)


def _blocks_to_run(request: GateRequest, repeat: int | None = None) -> RequestedPlan:
    """The sweep with its arms in blocks, of the cells that are judged."""
    wanted = replace(_request(request.sweep, request.arms), repeat=repeat, interleave=True)
    plans = requested_plan(wanted)
    if not request.only:
        return plans
    kept = matching([cell.id for cell in plans.whole.cells], request.only)
    return replace(plans, chosen=plans.whole.selected(kept))


def _measured(
    results: Path, request: GateRequest, policy: Policy
) -> tuple[JudgedSweep, BlockBudget]:
    """Add blocks of the arms until every required comparison is decided, or the time is spent."""
    if request.against or request.baseline or request.confirm:
        raise UsageError(
            "--budget adds blocks of two arms until they decide; it goes with none of --against, "
            "--baseline and --confirm"
        )
    if find_sweep_file(Path(request.sweep)) is None:
        raise UsageError(
            f"--budget runs blocks, so it needs the sweep file and its arms, found the id "
            f"{request.sweep!r}: gate SWEEP.yaml --arm base=GITREF --arm head=. --budget 10m"
        )
    plans = _blocks_to_run(request)
    store = ResultsStore.open(results, create=True)
    plans, sides = prepared_sides(plans, store)
    names = [arm.name for arm in plans.chosen.arms]
    pair = two_arms(plans.chosen.id, names, request.base_arm, request.head_arm)
    options = running.Options(results, budget_seconds=request.budget_seconds)
    _, outcome, budget = running.run_within(
        plans, sides, store, options, policy=policy, pairs=[pair]
    )
    if outcome.interrupted:
        raise KeyboardInterrupt
    stored = Plan.from_document(store.read_plan(plans.chosen.id))
    return JudgedSweep(stored.id, Resolved(plans, sides).expected(stored)), budget


def _confirmed(
    results: Path, store: ResultsStore, sweep: JudgedSweep, request: GateRequest, result: GateResult
) -> GateResult:
    """Run `asked.confirm` more blocks and judge all blocks together; `result` if one is lost."""
    if find_sweep_file(Path(request.sweep)) is None:
        raise UsageError(
            f"--confirm runs more blocks, so it needs the sweep file and its arms, found the id "
            f"{request.sweep!r}: gate SWEEP.yaml --arm base=GITREF --arm head=. --confirm N"
        )
    plan = Plan.from_document(store.read_plan(sweep.id))
    if not plan.interleaved:
        raise UsageError(
            f"--confirm runs more blocks, and {sweep.id} was not run with --interleave"
        )
    blocks = max((cell.repeats for cell in plan.cells), default=0) + request.confirm
    plans = _blocks_to_run(request, blocks)
    cells = f"{len(plans.chosen.cells)} of {len(plans.whole.cells)} cells"
    console.note(
        f"regressed; running {request.confirm} more blocks of {cells} before it is believed"
    )
    code = running.run_plans(
        plans, store, running.Options(results, shows_table=not request.as_json)
    )
    if code == exit_codes.INTERRUPTED:
        raise KeyboardInterrupt
    if code != exit_codes.OK:
        console.note("not every block of these has finished, so the regression stays as it was")
        return result
    return _judged(store, sweep, request, result.policy)


def _write_files(result: GateResult, request: GateRequest, now: datetime) -> None:
    markdown = gate_text.to_markdown(result, now)
    if request.junit is not None:
        console.write_file(request.junit, to_junit(result, strict=request.strict))
    if request.markdown is not None:
        console.write_file(request.markdown, markdown)
    if request.github:
        for line in github.annotation_lines(result):
            console.note(line) if request.as_json else console.data(line)
        place = os.environ.get("GITHUB_STEP_SUMMARY")
        if place:
            _append(Path(place), markdown)


def _append(path: Path, markdown: str) -> None:
    try:
        size = path.stat().st_size if path.exists() else 0
        with path.open("a", encoding="utf-8") as stream:
            stream.write(github.summary(markdown, size))
    except OSError as error:
        console.note(f"warning: the step summary {path} cannot be written: {error.strerror}")


def _ending(result: GateResult, request: GateRequest) -> int:
    code = gate_code(result, strict=request.strict)
    if result.undecided and not request.strict:
        count = len(result.of("inconclusive"))
        console.note(f"warning: {count} required comparisons are undecided (--strict makes it 4)")
    if result.failed and not result.judgements:
        reasons = "; ".join(f"{cell}: {why}" for cell, why in result.sides.failed[:5])
        raise NothingMeasuredError(f"nothing was measured: {reasons}")
    return code
