"""What the dtypes of a policy do to a gradient: exactly where defined, else with a slack.

m is the dtype of the accumulated gradient, c that of the wire. Strategies that hold whole gradients
add up k microbatches in m, cast once to c, reduce in c and cast back; the others cast and reduce
every microbatch and add the results up in m. An outer axis adds one more cast and reduction.

`expected` leaves the order of a sum over ranks open: any, in c or wider, is right. Its slack is
what n such roundings of c can make, and k + 2 of m, element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Model:
    """inner, outer: sizes of the axes (outer 1: none). every: reduced on every microbatch.

    rounds_sum: whether a sum over ranks may be rounded to the dtype of the wire. again: what all
    microbatches but the last one gave had been reduced, and is reduced with it once more.
    """

    main: torch.dtype
    wire: torch.dtype
    inner: int
    outer: int
    every: bool
    rounds_sum: bool = True
    again: bool = False


def sent(
    rows: Sequence[Sequence[Tensor]],
    main: torch.dtype,
    wire: torch.dtype,
    divisor: int,
    *,
    every: bool,
) -> list[list[Tensor]]:
    """What each rank puts on the wire, [reduction][rank], from g[r][j]: divided, then cast."""
    if every:
        reductions = [[row[j] for row in rows] for j in range(len(rows[0]))]
    else:
        reductions = [[accumulated(row, main) for row in rows]]
    wide = [[g.to(torch.promote_types(g.dtype, wire)) for g in row] for row in reductions]
    return [[(g * (1.0 / divisor)).to(wire) for g in row] for row in wide]


def accumulated(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Their sum, each addition rounded to `dtype`; a wider addend is not rounded before it."""
    total = torch.zeros(gradients[0].shape, dtype=dtype)
    for gradient in gradients:
        total.add_(gradient)
    return total


def expected(contributions: Sequence[Sequence[Tensor]], model: Model) -> tuple[Tensor, Tensor]:
    """The gradient, and the slack per element, FP64, from g[r][j] of one parameter.

    Ranks are outer-major: rank r is inner rank r % inner of outer rank r // inner.
    """
    sums: list[Tensor] = []
    slack = torch.zeros(contributions[0][0].shape, dtype=torch.float64)
    for outer in range(model.outer):
        rows = contributions[outer * model.inner : (outer + 1) * model.inner]
        total, allowed = _inner(rows, model, len(contributions))
        sums.append(total)
        slack += allowed
    if model.outer == 1:
        return sums[0], slack
    wired = [total.to(model.main).to(model.wire).double() for total in sums]
    size = torch.stack([value.abs() for value in wired]).sum(0)
    slack += size * (_unit(model.wire) * (model.outer + 1) + _unit(model.main))
    return torch.stack(wired).sum(0), slack


def _inner(rows: Sequence[Sequence[Tensor]], model: Model, divisor: int) -> tuple[Tensor, Tensor]:
    wire, main = _unit(model.wire), _unit(model.main)
    total = torch.zeros(rows[0][0].shape, dtype=torch.float64)
    size = torch.zeros_like(total)
    for tensors in sent(rows, model.main, model.wire, divisor, every=model.every):
        scaled = [tensor.double() for tensor in tensors]
        total += torch.stack(scaled).sum(0)
        size += torch.stack([value.abs() for value in scaled]).sum(0)
    roundings = model.inner + 1 if model.rounds_sum else 0
    slack = size * (wire * roundings + main * (len(rows[0]) + 2))
    if model.again:
        slack += _inner([row[:-1] for row in rows], replace(model, again=False), divisor)[1]
    return total, slack


def _unit(dtype: torch.dtype) -> float:
    """Unit roundoff: half the spacing of numbers next to 1."""
    return torch.finfo(dtype).eps / 2
