"""What the dtypes of a policy do to a gradient, and how far a right result may be from that.

m is the dtype of the accumulated gradient, c that of the wire. Strategies that hold whole gradients
add up k microbatches in m, cast once to c, reduce in c and cast back; the others cast and reduce
every microbatch and add the results up in m. An outer axis adds one more cast and reduction.
How a transport rounds the sum over n ranks is its own affair: any order, in c or wider, is right.
The slack is what n such roundings of c can make, and k + 2 of m, element by element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Model:
    """inner, outer: sizes of the axes (outer 1: none). every: reduced on every microbatch."""

    main: torch.dtype
    wire: torch.dtype
    inner: int
    outer: int
    every: bool


def expected(contributions: list[list[Tensor]], model: Model) -> tuple[Tensor, Tensor]:
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
    sent = [total.to(model.main).to(model.wire).double() for total in sums]
    size = torch.stack([value.abs() for value in sent]).sum(0)
    slack += size * (_unit(model.wire) * (model.outer + 1) + _unit(model.main))
    return torch.stack(sent).sum(0), slack


def _inner(rows: list[list[Tensor]], model: Model, scale: float) -> tuple[Tensor, Tensor]:
    wire, main = _unit(model.wire), _unit(model.main)
    count = len(rows[0])
    if model.every:
        per_step = [[row[j] for row in rows] for j in range(count)]
    else:
        per_step = [[_accumulated(row, model.main) for row in rows]]
    total = torch.zeros(rows[0][0].shape, dtype=torch.float64)
    size = torch.zeros_like(total)
    for tensors in per_step:
        sent = [(tensor.to(model.wire) * scale).double() for tensor in tensors]
        total += torch.stack(sent).sum(0)
        size += torch.stack([value.abs() for value in sent]).sum(0)
    return total, size * (wire * (model.inner + 1) + main * (count + 2))


def _accumulated(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    total = torch.zeros(gradients[0].shape, dtype=dtype)
    for gradient in gradients:
        total += gradient.to(dtype)
    return total


def _unit(dtype: torch.dtype) -> float:
    """Unit roundoff: half the spacing of numbers next to 1."""
    return torch.finfo(dtype).eps / 2
