"""What the dtypes of a policy do to a gradient: exactly where defined, else with a slack.

m is the dtype of the accumulated gradient, c that of the wire. Strategies that hold whole gradients
add up k microbatches in m, cast once to c, reduce in c and cast back; the others cast and reduce
every microbatch and add the results up in m. An outer axis adds one more cast and reduction.

`emulated` takes the sum over ranks in FP32, in rank order. Native collectives round it to c: for
two ranks exactly once; for more, a ring rounds the partial sums too. Direct exchange hands the FP32
sum on, except where the sum itself travels once more (all-reduce).
`expected` leaves that open: any order, in c or wider, is right. Its slack is what n such roundings
of c can make, and k + 2 of m, element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Model:
    """inner, outer: sizes of the axes (outer 1: none). every: reduced on every microbatch.

    rounds_sum: whether a sum over ranks may be rounded to the dtype of the wire.
    """

    main: torch.dtype
    wire: torch.dtype
    inner: int
    outer: int
    every: bool
    rounds_sum: bool = True


def sent(
    rows: Sequence[Sequence[Tensor]], main: torch.dtype, wire: torch.dtype, *, every: bool
) -> list[list[Tensor]]:
    """What each rank puts on the wire, [reduction][rank], from g[r][j]; nothing is divided yet."""
    if every:
        return [[row[j].to(wire) for row in rows] for j in range(len(rows[0]))]
    return [[accumulated(row, main).to(wire) for row in rows]]


def accumulated(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Their sum, each addition rounded to `dtype`; a wider addend is not rounded before it."""
    total = torch.zeros(gradients[0].shape, dtype=dtype)
    for gradient in gradients:
        total.add_(gradient)
    return total


def reduced(contributions: Sequence[Tensor], divisor: int, *, rounds_sum: bool) -> Tensor:
    """The sum over ranks of what each sent, divided before it is added."""
    dtype = contributions[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros_like(contributions[0], dtype=wide)
    for contribution in contributions:
        total += (contribution / divisor).to(wide)
    return total.to(dtype) if rounds_sum else total


def emulated(
    rows: Sequence[Sequence[Tensor]],
    main: torch.dtype,
    wire: torch.dtype,
    divisor: int,
    *,
    every: bool,
    rounds_sum: bool,
) -> Tensor:
    """The gradient on one axis, from g[r][j] of one parameter."""
    reductions = sent(rows, main, wire, every=every)
    return accumulated([reduced(r, divisor, rounds_sum=rounds_sum) for r in reductions], main)


def expected(contributions: Sequence[Sequence[Tensor]], model: Model) -> tuple[Tensor, Tensor]:
    """The gradient, and the slack per element, FP64, from g[r][j] of one parameter.

    Ranks are outer-major: rank r is inner rank r % inner of outer rank r // inner.
    """
    scale = 1.0 / len(contributions)
    sums: list[Tensor] = []
    slack = torch.zeros(contributions[0][0].shape, dtype=torch.float64)
    for outer in range(model.outer):
        rows = contributions[outer * model.inner : (outer + 1) * model.inner]
        total, allowed = _inner(rows, model, scale)
        sums.append(total)
        slack += allowed
    if model.outer == 1:
        return sums[0], slack
    wired = [total.to(model.main).to(model.wire).double() for total in sums]
    size = torch.stack([value.abs() for value in wired]).sum(0)
    slack += size * (_unit(model.wire) * (model.outer + 1) + _unit(model.main))
    return torch.stack(wired).sum(0), slack


def _inner(rows: Sequence[Sequence[Tensor]], model: Model, scale: float) -> tuple[Tensor, Tensor]:
    wire, main = _unit(model.wire), _unit(model.main)
    total = torch.zeros(rows[0][0].shape, dtype=torch.float64)
    size = torch.zeros_like(total)
    for tensors in sent(rows, model.main, model.wire, every=model.every):
        scaled = [(tensor * scale).double() for tensor in tensors]
        total += torch.stack(scaled).sum(0)
        size += torch.stack([value.abs() for value in scaled]).sum(0)
    roundings = model.inner + 1 if model.rounds_sum else 0
    return total, size * (wire * roundings + main * (len(rows[0]) + 2))


def _unit(dtype: torch.dtype) -> float:
    """Unit roundoff: half the spacing of numbers next to 1."""
    return torch.finfo(dtype).eps / 2
