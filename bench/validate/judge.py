"""From what the ranks of a case saw to its verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from bench.engines.mfsdp import node_name
from bench.validate.case_evidence import CaseEvidence
from bench.validate.cases import SCENARIOS, Case
from bench.validate.checks import collectives, gradients, memory, streams, weights, wire
from bench.validate.joining import JoiningError
from bench.validate.ranks import CaseOutcome
from bench.validate.traces import frames_of
from bench.verdict import CaseVerdict, CheckVerdict, Finding

#: None: the scenario of the case does not ask it.
Check = Callable[[CaseEvidence], CheckVerdict | None]

#: In the order in which they are asked and printed: causes before what follows from them.
CHECKS: tuple[Check, ...] = (
    weights.initial_weights,
    weights.computed_weights,
    weights.losses,
    gradients.gradients,
    gradients.norm_and_clipping,
    weights.optimizer_step,
    weights.replicas,
    weights.gathered_weights,
    weights.exported_weights,
    weights.strict_loading,
    streams.stream_order,
    wire.dtypes,
    wire.gather_precision,
    wire.order,
    wire.accounts,
    wire.groups,
    collectives.counts,
    collectives.volume,
    memory.at_rest,
    memory.no_growth,
    memory.freed,
)
_ENDINGS = {
    "raised": "no exception",
    "died": "a rank that lives",
    "hung": "an answer of every rank in time",
}
_LAST_EVENTS = 5
#: What Python writes before the stack of a process that a signal ends.
_FATAL = "Fatal Python error"


def judge(case: Case, outcome: CaseOutcome, device: torch.device) -> CaseVerdict:
    """The verdict of one case."""
    verdict = CaseVerdict(
        case=case.id,
        engine=case.engine,
        state="passed",
        settings=settings(case),
        seconds=round(outcome.seconds, 3),
        cpu_seconds=round(sum(one.cpu_seconds for one in outcome.seen), 3),
    )
    if outcome.kind == "unsupported":
        return verdict.model_copy(update={"state": "not_applicable", "reason": outcome.text})
    if outcome.kind != "seen":
        checks: tuple[CheckVerdict, ...] = (_unfinished(case, outcome),)
    else:
        evidence = CaseEvidence(case, outcome.seen, device, autocast=outcome.seen[0].autocast)
        asked = (_asked(check, evidence) for check in CHECKS)
        checks = tuple(verdict for verdict in asked if verdict is not None)
    checks = tuple(_placed(check, case) for check in checks)
    failed = any(check.state == "failed" for check in checks)
    return verdict.model_copy(update={"state": "failed" if failed else "passed", "checks": checks})


def _placed(check: CheckVerdict, case: Case) -> CheckVerdict:
    """With the place of the rank on both axes of a hybrid mesh, and the name of its node."""
    found = check.finding
    if found is None or found.rank is None or case.outer == 1:
        return check
    outer, inner = divmod(case.data_rank(found.rank), case.inner)
    position = f"outer {outer}, inner {inner}, on {node_name()}"
    return check.model_copy(update={"finding": found.model_copy(update={"position": position})})


def settings(case: Case) -> dict[str, Any]:
    """Everything that makes the case, for a record."""
    return dataclasses.asdict(case) | {"does": SCENARIOS[case.scenario]}


def _asked(check: Check, evidence: CaseEvidence) -> CheckVerdict | None:
    try:
        return check(evidence)
    except JoiningError as error:
        finding = Finding(expected="shards that make up the parameter", found=str(error))
        name = check.__name__.replace("_", " ")
        return CheckVerdict(check=name, state="failed", finding=finding)


def _unfinished(case: Case, outcome: CaseOutcome) -> CheckVerdict:
    """Where the rank was: the step that it began last, and the last events of the core."""
    begun = [index for index, line in enumerate(outcome.log) if line.startswith(case.id)]
    where = (
        outcome.log[begun[-1]].removeprefix(f"{case.id}: ") if begun else "before the first step"
    )
    said = [line for line in outcome.log[min(begun, default=0) :] if not line.startswith(case.id)]
    fatal = next((n for n, line in enumerate(said) if line.startswith(_FATAL)), len(said))
    events = said[:fatal][-_LAST_EVENTS:]
    frames = frames_of("\n".join(said[fatal:])) or outcome.frames
    finding = Finding(
        rank=outcome.rank,
        expected=_ENDINGS[outcome.kind],
        found=outcome.text,
        evidence=(f"in {where}", *(f"last: {line}" for line in events), *frames),
    )
    return CheckVerdict(check="runs to its end", state="failed", finding=finding)
