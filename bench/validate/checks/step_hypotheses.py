"""What a wrong optimizer step looks like: simple mistakes, each tried on the reference."""

from __future__ import annotations

from collections.abc import Callable

from bench.testing.reference import Named, relative
from bench.validate.case_evidence import CaseEvidence
from bench.validate.reference import ReferenceOptimizer


def explanations(evidence: CaseEvidence, step: int, name: str) -> list[str]:
    """The mistakes that give the weights which were found of a parameter after `step`."""
    if name not in evidence.trainable:
        return ["the parameter is frozen and must not change"]
    found = evidence.weights[step][name]
    told = []
    for text, mistake in _MISTAKES.items():
        wanted = mistake(evidence, step)
        if wanted is None:
            continue
        size = float(wanted[name].double().norm())
        if relative(found, wanted[name], size) <= evidence.tolerance:
            told.append(text)
    return told


def _gradients(evidence: CaseEvidence, step: int) -> Named:
    clipped = evidence.seen[0].steps[step].clipped is not None
    return {n: g for n, g in evidence.gradients(step, clipped=clipped).items() if g is not None}


def _replayed(evidence: CaseEvidence, step: int) -> ReferenceOptimizer:
    """An optimizer that has made all steps before `step`."""
    optimizer = evidence.optimizer()
    for earlier in (one for one in evidence.updated_steps if one < step):
        optimizer.step(_gradients(evidence, earlier), evidence.before(earlier))
    return optimizer


def _not_stepped(evidence: CaseEvidence, step: int) -> Named | None:
    return evidence.before(step)


def _not_clipped(evidence: CaseEvidence, step: int) -> Named | None:
    if evidence.seen[0].steps[step].clipped is None:
        return None
    return _replayed(evidence, step).step(evidence.gradients(step), evidence.before(step))


def _without_moments(evidence: CaseEvidence, step: int) -> Named | None:
    if step == 0:
        return None
    return evidence.optimizer().step(_gradients(evidence, step), evidence.before(step))


def _with_gradients_before(evidence: CaseEvidence, step: int) -> Named | None:
    if step == 0:
        return None
    optimizer = _replayed(evidence, step)
    return optimizer.step(_gradients(evidence, step - 1), evidence.before(step))


def _without_decay(evidence: CaseEvidence, step: int) -> Named | None:
    optimizer = _replayed(evidence, step)
    return optimizer.step(_gradients(evidence, step), evidence.before(step), decays=False)


_MISTAKES: dict[str, Callable[[CaseEvidence, int], Named | None]] = {
    "as if not stepped: it keeps the value from before": _not_stepped,
    "as if not clipped: the step took the gradients from before clipping": _not_clipped,
    "as if the moments of the steps before were lost": _without_moments,
    "as if the gradients of the step before were used again": _with_gradients_before,
    "as if without weight decay": _without_decay,
}
