"""The gradients that the optimizer is handed, on each rank's own rows; their norm and clipping."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from bench.engines.inspection import LocalRows
from bench.testing.reference import relative
from bench.validate import joining
from bench.validate.attribution import Attribution, attribute
from bench.validate.case_evidence import CaseEvidence, WrongError, numbers, numbers_apart, wrong
from bench.validate.checks import wire
from bench.validate.reference import clip_coefficient, norm_of
from bench.verdict import GradientError

_NORM_SLACK = 10
#: Engines that promise no gradient, rather than zeros, for a parameter that no rank used.
_LEAVE_UNUSED_ALONE = ("mfsdp",)


def gradients(evidence: CaseEvidence) -> str:
    """Every parameter, step and rank against the mean over ranks of the sum over microbatches.

    A parameter that no rank used has no gradient, as in plain torch: momentum and weight decay
    would move it with zeros. Engines that promise less may hand out zeros.
    """
    worst = 0.0
    for step in evidence.steps:
        if step not in evidence.updated_steps and evidence.seen[0].refusal:
            continue  # the further pass was refused, in words
        for name in evidence.trainable:
            expected, slack = evidence.expected_gradient(name, step)
            shards = evidence.gradient_shards(name, step)
            if evidence.case.engine in _LEAVE_UNUSED_ALONE:
                _check_unused(evidence, name, step)
            for rank in evidence.ranks:
                excess = _excess(evidence, name, shards, rank, (expected, slack))
                if excess > 1 or excess != excess:  # noqa: PLR0124 - NaN
                    raise _told(evidence, name, step, rank)
                worst = max(worst, excess)
    rule = f"tolerance {evidence.tolerance:g}, relative norm"
    if _rounds(evidence):
        rule = "rounding bound of the dtype policy"
    return f"largest difference {worst:.2g} of the {rule}"


def errors(evidence: CaseEvidence) -> tuple[GradientError, ...]:
    """Whole gradients against the reference, of each parameter the step with the worst."""
    worst: dict[str, GradientError] = {}
    for step in evidence.steps:
        for name, gradient in evidence.gradients(step).items():
            expected, _ = evidence.expected_gradient(name, step)
            size = float(expected.norm())
            if gradient is None and size == 0:
                continue
            far, off = math.inf, math.inf
            if gradient is not None:
                difference = (gradient.double() - expected).abs()
                far, off = float(difference.max()), relative(gradient, expected, size)
            if name not in worst or not off <= worst[name].relative:
                row = {"parameter": name, "step": step + 1, "max_abs": far, "relative": off}
                worst[name] = GradientError.model_validate(row)
    return tuple(worst.values())


def _check_unused(evidence: CaseEvidence, name: str, step: int) -> None:
    """A parameter without a use has no gradient, and what was used has one, be it of zeros."""
    is_used = name in evidence.raw(step).used
    for rank, shard in enumerate(evidence.gradient_shards(name, step)):
        if (shard is not None) == is_used:
            continue
        raise wrong(
            step,
            parameter=name,
            rank=rank,
            expected="a gradient: a rank used it" if is_used else "no gradient: no rank used it",
            found="gradient is None" if shard is None else f"a gradient, {numbers(shard.rows)}",
            evidence=evidence.wire_lines(step, name, rank),
        )


def _rounds(evidence: CaseEvidence) -> bool:
    return any(
        evidence.expected_gradient(evidence.trainable[0], step)[1] is not None
        for step in evidence.steps
    )


def _excess(
    evidence: CaseEvidence,
    name: str,
    shards: list[LocalRows | None],
    rank: int,
    wanted: tuple[Tensor, Tensor | None],
) -> float:
    """Difference in units of what is allowed; more than 1 is wrong."""
    expected, slack = wanted
    shard = shards[rank]
    size = float(expected.norm())
    if shard is None:
        # For engines that promise neither, None and zero are both a gradient that is not there.
        return 0.0 if size == 0 else float("inf")
    rows, allowed = _rows(evidence, name, shards, rank, expected), None
    if rows is None:
        return float("inf")
    if slack is not None:
        allowed = _rows(evidence, name, shards, rank, slack)
    if allowed is None:
        return relative(shard.rows, rows, size) / evidence.tolerance
    difference = (shard.rows.double() - rows).abs()
    if not torch.isfinite(difference).all():
        return float("inf")
    # What 32 bits cannot tell apart is no difference either.
    floor = 1e-6 * size / max(1, expected.numel()) ** 0.5
    return float((difference / (allowed + floor + 1e-30)).max()) if difference.numel() else 0.0


def _rows(
    evidence: CaseEvidence, name: str, shards: list[LocalRows | None], rank: int, full: Tensor
) -> Tensor | None:
    """The rows of `whole` that the shard of `rank` stands for; None if the shards do not fit."""
    own = shards[rank]
    there = [shard for shard in shards if shard is not None]
    if own is None or len(there) != len(shards):
        return None
    try:
        joining.joined(name, there, evidence.reference.shapes[name])
        return joining.cut(full, joining.first_row(there, rank), own)
    except (joining.JoiningError, RuntimeError):
        return None


def _told(evidence: CaseEvidence, name: str, step: int, rank: int) -> WrongError:
    expected, slack = evidence.expected_gradient(name, step)
    shards = evidence.gradient_shards(name, step)
    shard = shards[rank]
    rows = _rows(evidence, name, shards, rank, expected)
    lines = (*_unreduced(evidence, step, rank), *evidence.wire_lines(step, name, rank))
    if shard is None or rows is None:
        there = ["gradient is None" if p is None else tuple(p.rows.shape) for p in shards]
        return wrong(
            step,
            parameter=name,
            rank=rank,
            evidence=lines,
            expected=f"a gradient of shape {evidence.reference.shapes[name]} over all ranks",
            found=f"by rank: {', '.join(map(str, there))}",
        )
    explained = _explained(evidence, step, rank, name)
    moved = _rows_of_another(evidence, name, step, rank)
    if not moved and (explained is None or not explained.lines):
        moved = _multiple(shard.rows, rows, evidence.tolerance)
    off = relative(shard.rows, rows, float(expected.norm()))
    allowed = "the rounding bound" if slack is not None else f"{evidence.tolerance:g}"
    first = explained.microbatch if explained else None
    return wrong(
        step,
        f"relative difference {off:.2g}, allowed {allowed}",
        parameter=name,
        rank=rank,
        microbatch=None if first is None else first + 1,
        **numbers_apart(rows, shard.rows),
        evidence=(*(explained.lines if explained else ()), *moved, *lines),
    )


def _unreduced(evidence: CaseEvidence, step: int, rank: int) -> tuple[str, ...]:
    """Whether a rank, of several, has sent no gradient in the step."""
    sent = wire.payloads(evidence.seen[rank].steps[step].sent)
    if evidence.case.data_ranks == 1 or any(wire.may_reduce(message.operation) for message in sent):
        return ()
    return ("nothing was reduced in this step: as if a no_sync() were still open",)


def _explained(evidence: CaseEvidence, step: int, rank: int, name: str) -> Attribution | None:
    """From the parameter alone if it has elements enough, else from its bucket's."""
    bucket = evidence.bucket_of(name)
    companions = [n for n in evidence.trainable if n != name and evidence.bucket_of(n) == bucket]
    for names in ([name], [name, *companions]):
        reduced: list[Tensor] = []
        raw = evidence.raw(step)
        contributions: list[list[list[Tensor]]] = [
            [[] for _ in row] for row in raw.contributions(name)
        ]
        before: list[Tensor] = []
        for member in names:
            shards = evidence.gradient_shards(member, step)
            shard = shards[rank]
            if shard is None or _rows(evidence, member, shards, rank, raw.mean(member)) is None:
                continue
            reduced.append(shard.rows)
            for r, row in enumerate(raw.contributions(member)):
                for j, gradient in enumerate(row):
                    rows = _rows(evidence, member, shards, rank, gradient)
                    contributions[r][j].append(gradient if rows is None else rows)
            if step > 0:
                rows = _rows(evidence, member, shards, rank, evidence.raw(step - 1).mean(member))
                before.append(shard.rows if rows is None else rows)
        others = [("the gradient of the step before", before)] if step > 0 else []
        own, outer = evidence.case.data_rank(rank), evidence.case.outer
        explained = (
            attribute(reduced, contributions, others, rank=own, outer=outer) if reduced else None
        )
        if explained is not None and explained.lines:
            return explained
    return None


def _rows_of_another(evidence: CaseEvidence, name: str, step: int, rank: int) -> tuple[str, ...]:
    """Whether these are another rank's rows."""
    expected, _ = evidence.expected_gradient(name, step)
    shards = evidence.gradient_shards(name, step)
    own = shards[rank]
    if own is None or own.parts == 1 or own.rows.numel() == 0:
        return ()
    for other in evidence.ranks:
        theirs = _rows(evidence, name, shards, other, expected)
        same_place = shards[other] is None or shards[other].order == own.order  # type: ignore[union-attr]
        if same_place or theirs is None or theirs.shape != own.rows.shape:
            continue
        if relative(own.rows, theirs, float(expected.norm())) <= 1e3 * evidence.tolerance:
            return (f"these are the rows that belong to rank {other}",)
    return ()


def _multiple(gradient: Tensor, expected: Tensor, tolerance: float) -> tuple[str, ...]:
    """Whether every element is the same multiple of what is right."""
    gradient, expected = gradient.double(), expected.double()
    factor = float((gradient * expected).sum() / expected.square().sum())
    if relative(gradient, factor * expected, float(gradient.norm())) > 1e3 * tolerance:
        return ()
    return (f"every element is {factor:.6g} times what is right",)


def norm_and_clipping(evidence: CaseEvidence) -> str | None:
    """The norm before clipping on every rank, and what clipping leaves: nothing below the bound."""
    clipped = [s for s in evidence.fed_steps if evidence.seen[0].steps[s].clipped is not None]
    for step in clipped:
        _check_norm(evidence, step)
        _check_clipped(evidence, step)
    if not clipped:
        return None
    norms = ", ".join(f"{_whole_norm(evidence, step):.6g}" for step in clipped)
    return f"norms {norms}; bounds {[_bound(evidence, step) for step in clipped]}"


def _bound(evidence: CaseEvidence, step: int) -> float:
    return evidence.seen[0].steps[step].bound or math.inf


def _whole_norm(evidence: CaseEvidence, step: int) -> float:
    """Before clipping; of gradients per token where losses are."""
    return norm_of(evidence.case, evidence.gradients(step)) / evidence.tokens


def _check_norm(evidence: CaseEvidence, step: int) -> None:
    full_norm = _whole_norm(evidence, step)
    allowed = _NORM_SLACK * evidence.tolerance * full_norm
    for rank, watched in enumerate(evidence.seen):
        norm = watched.steps[step].norm
        if norm is None or abs(norm - full_norm) <= allowed:
            continue
        lines = []
        squares = sum(_squares(p) for p in watched.steps[step].gradients.values())
        own = math.sqrt(squares) / evidence.tokens
        once = norm_of(replace(evidence.case, model="stack"), evidence.gradients(step))
        once /= evidence.tokens
        if abs(norm - own) <= allowed:
            lines.append("this is the norm of the rank's own rows")
        elif abs(norm - once) <= allowed:
            lines.append("parts or experts that other ranks hold are not counted")
        raise wrong(step, rank=rank, evidence=tuple(lines), **numbers_apart(full_norm, norm))


def _squares(shard: LocalRows | None) -> float:
    return 0.0 if shard is None else float(shard.rows.double().square().sum())


def _check_clipped(evidence: CaseEvidence, step: int) -> None:
    full_norm = _whole_norm(evidence, step)
    factor = clip_coefficient(full_norm, _bound(evidence, step)) / evidence.tokens
    before, after = evidence.gradients(step), evidence.gradients(step, clipped=True)
    for name, gradient in before.items():
        clipped = after[name]
        if gradient is None or clipped is None:
            continue
        if (
            relative(clipped, gradient.double() * factor, full_norm)
            <= _NORM_SLACK * evidence.tolerance
        ):
            continue
        if torch.equal(clipped, gradient):
            line = "as if not clipped"
        elif factor == 1.0 / evidence.tokens:
            bound = _bound(evidence, step)
            line = f"the norm {full_norm:.6g} is below the bound {bound:g}: nothing to clip"
        else:
            line = f"scaled by {float(clipped.double().norm() / gradient.double().norm()):.6g}"
        raise wrong(
            step,
            parameter=name,
            **numbers_apart(gradient * factor, clipped),
            evidence=(f"{factor:.6g} times the gradient was expected", line),
        )
