"""Main weights: where they start, what a step makes of them, and what modules then read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bench.testing.reference import Named, relative
from bench.validate.case_evidence import (
    CaseEvidence,
    NotApplicableError,
    WrongError,
    difference,
    numbers,
    numbers_apart,
    wrong,
)
from bench.validate.cases import EXPERT_PARALLEL

_OTHER_SEED = 8
_LOSS_SLACK = 20
_PEERS = "the loss of a rank holds what its experts make of other ranks' tokens"


def initial_weights(evidence: CaseEvidence) -> str:
    """The engine starts from the values that its model had."""
    case = evidence.case
    if not evidence.steps:
        raise wrong(expected="finite weights", found="NaN or Inf before the first step")
    sharded = bool(case.sharded)
    if case.scenario == "equalised" and sharded:
        raise NotApplicableError("every row keeps the value of the rank that owns it")
    wanted = evidence.reference.initial(_OTHER_SEED if case.scenario == "reloaded" else 7)
    for name, expected in wanted.items():
        weight = evidence.initial[name]
        if not torch.equal(weight.to(expected.dtype), expected):
            raise wrong(None, parameter=name, **numbers_apart(expected, weight))
    return "bit-equal"


def replicas(evidence: CaseEvidence) -> str | None:
    """Ranks that hold the same shard of a main weight hold the same bits, after every step."""
    compared = 0
    for step in (-1, *evidence.steps):
        for name in evidence.reference.shapes:
            first: dict[int, int] = {}
            for rank, watched in enumerate(evidence.seen):
                held = watched.initial if step < 0 else watched.steps[step].weights
                other = first.setdefault(held[name].order, rank)
                theirs = evidence.seen[other]
                shard = theirs.initial if step < 0 else theirs.steps[step].weights
                compared += other != rank
                if not _same_bits(held[name].rows, shard[name].rows):
                    told = difference(shard[name].rows, held[name].rows) or {}
                    told["expected"] = f"the bits of rank {other}: {told.get('expected')}"
                    raise wrong(step, parameter=name, rank=rank, **told)
    return f"{compared} comparisons, bit-equal" if compared else None


def _same_bits(weight: Tensor, other: Tensor) -> bool:
    """A NaN is one on both: where it comes from is for other checks."""
    same_shape = weight.shape == other.shape
    return same_shape and torch.allclose(weight, other, rtol=0, atol=0, equal_nan=True)


def optimizer_step(evidence: CaseEvidence) -> str:
    """Weights after each step against torch's AdamW, fed with the gradients that were found."""
    optimizer = evidence.optimizer()
    worst = 0.0
    for step in evidence.fed_steps:
        before = evidence.before(step)
        clipped = evidence.seen[0].steps[step].clipped is not None
        gradients = evidence.gradients(step, clipped=clipped)
        if not clipped and evidence.tokens > 1:  # the step divides what no clipping has divided
            gradients = {
                name: None if gradient is None else gradient / evidence.tokens
                for name, gradient in gradients.items()
            }
        expected: Named = dict(before)
        if step in evidence.updated_steps:
            expected |= optimizer.step(gradients, before)
        for name, wanted in expected.items():
            weight = evidence.weights[step][name]
            off = relative(weight, wanted, float(wanted.double().norm()))
            worst = max(worst, off)
            if not off <= evidence.tolerance:
                raise _changed(evidence, step, name, expected, off)
    return f"relative difference {worst:.1e}, allowed {evidence.tolerance:g}"


def _changed(
    evidence: CaseEvidence, step: int, name: str, expected: Named, off: float
) -> WrongError:
    weight = evidence.weights[step][name]
    lines = [f"relative difference {off:.2g}, allowed {evidence.tolerance:g}"]
    if name not in evidence.trainable:
        lines.append("the parameter is frozen and must not change")
    told = numbers_apart(expected[name], weight)
    return wrong(step, parameter=name, evidence=tuple(lines), **told)


def computed_weights(evidence: CaseEvidence) -> str:
    """What modules read in a step: the main weights in the compute dtype, alike on all ranks."""
    for step in evidence.steps:
        earlier = evidence.encoded_before(step)
        wanted = evidence.reference.as_computed(evidence.before(step), earlier)
        for rank, watched in enumerate(evidence.seen):
            for name in sorted(evidence.raw(step).read[evidence.case.data_rank(rank)]):
                _check_read(evidence, step, name, rank, wanted)
                late = [m for m, weight in watched.steps[step].changed if weight == name]
                if late:
                    raise wrong(
                        step, parameter=name, rank=rank, microbatch=late[0] + 1,
                        expected="what the first microbatch of the step read",
                        found="another value, or a shard of it",
                    )  # fmt: skip
    return "bit-equal on all ranks and in all microbatches"


def _check_read(evidence: CaseEvidence, step: int, name: str, rank: int, wanted: Named) -> None:
    computed = evidence.seen[rank].steps[step].computed.get(name)
    expected = wanted[name]
    told = difference(expected, computed)
    if told is None:
        return
    lines: list[str] = []
    if computed is None:
        told["found"] = "no module read it: the hooks of its module did not run"
    else:
        told |= {"expected": numbers(expected)} if computed.shape != expected.shape else {}
        told["found"] += f" {computed.dtype}"
        if step > 0:
            older = evidence.reference.as_computed(evidence.before(step - 1))[name]
            if difference(older, computed) is None:
                lines.append("these are the weights from before the last step")
    lines += evidence.wire_lines(step, name, rank)
    told["expected"] += f" {expected.dtype}, shape {tuple(expected.shape)}"
    raise wrong(step, parameter=name, rank=rank, evidence=tuple(lines), **told)


def losses(evidence: CaseEvidence) -> str:
    """The loss of every microbatch of every rank."""
    if evidence.case.model in EXPERT_PARALLEL:
        raise NotApplicableError(_PEERS)
    compute = evidence.reference.compute
    allowed = _LOSS_SLACK * torch.finfo(compute).eps
    for step, rank, seen_step in evidence.each():
        wanted = evidence.raw(step).losses[evidence.case.data_rank(rank)]
        for index, loss in enumerate(seen_step.losses):
            expected = wanted[index]
            if not abs(loss - expected) <= allowed * abs(expected):
                raise wrong(
                    step,
                    rank=rank,
                    microbatch=index + 1,
                    **numbers_apart(expected, loss),
                )
    return f"within {allowed:.0e}"


def gathered_weights(evidence: CaseEvidence) -> str | None:
    """The engine's own whole weights against those put together here."""
    poisoned = len(evidence.steps) < len(evidence.seen[0].steps)
    evidence.require("whole weights")
    if evidence.seen[0].whole is None or poisoned:
        return None
    if evidence.case.tensor > 1:
        raise NotApplicableError("the whole weight spans tensor-parallel ranks as well")
    for rank, watched in enumerate(evidence.seen):
        # Asked behind the last step: what went wrong before it is told first.
        _check_equal(watched.whole or {}, evidence.weights[-1], rank, step=len(watched.steps) - 1)
    return "bit-equal"


def exported_weights(evidence: CaseEvidence) -> str | None:
    """Whole weights by every way out of the engine, and by files in again, to the bit."""
    if evidence.case.scenario != "exported":
        return None
    for rank, watched in enumerate(evidence.seen):
        ways = dict(watched.exported or {})
        losses = ways.pop("loss", {})
        for way, exported in ways.items():
            if exported or rank == 0:  # ranks besides the first need not get the whole
                _check_equal(exported, evidence.initial, rank, way=(f"by {way}",))
        # A copy computes with the weights themselves, the model with codes of them.
        if evidence.case.recipe == "none" and len({float(x) for x in losses.values()}) > 1:
            raise wrong(rank=rank, expected="equal losses", found=str(losses))
    return ", ".join(evidence.seen[0].exported or {})


def _check_equal(
    weights: Mapping[str, Tensor],
    wanted: Named,
    rank: int,
    step: int | None = None,
    way: tuple[str, ...] = (),
) -> None:
    for name, expected in wanted.items():
        value = weights.get(name)
        # A parameter of shape () may come as one row.
        if value is not None and not expected.shape and value.numel() == 1:
            value = value.reshape(())
        told = difference(expected, value)
        if told is not None:
            raise wrong(step, parameter=name, rank=rank, evidence=way, **told)


def strict_loading(evidence: CaseEvidence) -> str | None:
    """A state dict that lacks a parameter is refused."""
    if evidence.case.scenario != "reloaded":
        return None
    for rank, watched in enumerate(evidence.seen):
        if watched.refusal is None:
            raise wrong(
                parameter=list(evidence.reference.shapes)[-1],
                rank=rank,
                expected="an error for a state dict that lacks it",
                found="loaded without an error",
            )
    return (evidence.seen[0].refusal or "")[:120]
