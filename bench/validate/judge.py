"""From how a case ended, and what its ranks saw, to its verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.engines.mfsdp import node_name
from bench.validate.case_evidence import CaseEvidence, NotApplicableError, WrongError
from bench.validate.cases import SCENARIOS, AnyCase, Case
from bench.validate.checks import collectives, gradients, memory, weights, wire
from bench.validate.joining import JoiningError
from bench.validate.program import Program
from bench.validate.rank import Outcome
from bench.validate.toy_models import TOY_MODELS
from bench.verdict import CaseVerdict, CheckVerdict, Finding

#: What it measured; None: the scenario of the case does not ask it.
Check = Callable[[CaseEvidence], str | None]

#: By the name that is printed, in the order in which they are asked: causes before what follows.
CHECKS: dict[str, Check] = {
    "initial weights": weights.initial_weights,
    "computed weights": weights.computed_weights,
    "losses": weights.losses,
    "gradients": gradients.gradients,
    "norm and clipping": gradients.norm_and_clipping,
    "optimizer step": weights.optimizer_step,
    "replicas": weights.replicas,
    "gathered weights": weights.gathered_weights,
    "exported weights": weights.exported_weights,
    "strict loading": weights.strict_loading,
    "wire dtypes": wire.dtypes,
    "gather precision": wire.gather_precision,
    "wire order": wire.order,
    "wire accounts": wire.accounts,
    "gather group": wire.groups,
    "collective counts": collectives.counts,
    "buffers": collectives.volume,
    "memory at rest": memory.at_rest,
    "no growth": memory.no_growth,
    "freed after deletion": memory.freed,
}
_ENDINGS = {
    "raised": "no exception",
    "died": "a rank that lives",
    "hung": "an answer of every rank in time",
}
_LINES_OF_PROGRAM = 6


def judge(
    case: AnyCase, outcome: Outcome, device: torch.device, *, errors: bool = False
) -> CaseVerdict:
    """The verdict of one case; with the errors of its gradients, where they fit together."""
    verdict = CaseVerdict(
        case=case.id,
        engine=case.engine,
        state="passed",
        settings=settings(case),
        seconds=round(outcome.seconds, 3),
        cpu_seconds=round(sum(answer.cpu_seconds for answer in outcome.answers), 3),
    )
    is_refused = outcome.kind == "refused" and isinstance(case, Case)
    if outcome.kind == "not_run" or is_refused:
        return verdict.model_copy(update={"state": "not_applicable", "reason": outcome.text})
    checks: Sequence[CheckVerdict]
    if isinstance(case, Program):
        checks = [_as_plain_torch(outcome)]
    elif outcome.kind != "ended":
        checks = [_placed(_unfinished(outcome), case)]
    else:
        evidence = CaseEvidence(case, outcome.answers, device)
        verdicts = (_asked(name, check, evidence) for name, check in CHECKS.items())
        checks = [_placed(check, case) for check in verdicts if check is not None]
        if errors:
            with contextlib.suppress(JoiningError):
                verdict = verdict.model_copy(update={"errors": gradients.errors(evidence)})
    failed = any(check.state == "failed" for check in checks)
    state = "failed" if failed else "passed"
    return verdict.model_copy(update={"state": state, "checks": tuple(checks)})


def _placed(check: CheckVerdict, case: Case) -> CheckVerdict:
    """With the place of the rank on both axes of a hybrid mesh, and the name of its node."""
    finding = check.finding
    if finding is None or finding.rank is None or case.outer == 1:
        return check
    outer, inner = divmod(case.data_rank(finding.rank), case.inner)
    position = f"outer {outer}, inner {inner}, on {node_name()}"
    return check.model_copy(update={"finding": finding.model_copy(update={"position": position})})


def settings(case: AnyCase) -> dict[str, Any]:
    """Everything that makes the case, for a record."""
    if isinstance(case, Program):
        made = dataclasses.asdict(case)
        return made | {"does": made.pop("name")}
    model = (inspect.getdoc(TOY_MODELS[case.model].build) or "").partition("\n")[0]
    return dataclasses.asdict(case) | {"does": f"{SCENARIOS[case.scenario]}. Model: {model}"}


def _asked(name: str, check: Check, evidence: CaseEvidence) -> CheckVerdict | None:
    try:
        measured = check(evidence)
    except NotApplicableError as error:
        return CheckVerdict(check=name, state="not_applicable", reason=str(error))
    except WrongError as error:
        finding, measured = error.finding, error.measured
    except JoiningError as error:
        finding = Finding(expected="shards that make up the parameter", found=str(error))
        measured = ""
    else:
        if measured is None:
            return None
        return CheckVerdict(check=name, state="passed", measured=measured)
    return CheckVerdict(check=name, state="failed", finding=finding, measured=measured)


def _as_plain_torch(outcome: Outcome) -> CheckVerdict:
    """The one check of a program: all of it ends as plain torch does."""
    if outcome.kind == "equal":
        return CheckVerdict(check="as plain torch", state="passed")
    lines = [line for line in "\n".join(outcome.lines).splitlines() if line.strip()]
    finding = Finding(
        expected="what plain torch does",
        found=f"{outcome.kind}: {lines[0] if lines else ''}",
        evidence=tuple(lines[1:][-_LINES_OF_PROGRAM:]),
    )
    return CheckVerdict(check="as plain torch", state="failed", finding=finding)


def _unfinished(outcome: Outcome) -> CheckVerdict:
    finding = Finding(
        rank=outcome.rank,
        expected=_ENDINGS[outcome.kind],
        found=outcome.text,
        evidence=outcome.where,
    )
    return CheckVerdict(check="runs to its end", state="failed", finding=finding)
