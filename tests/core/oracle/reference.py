"""What must come out of the toy models, from plain torch and none of our code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor, nn

from bench.testing.reference import Named, gradient, mean, relative
from oracle.models import batch, build, loss

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def raw_gradients(
    model: nn.Module, name: str, ranks: int, microbatches: int, dtype: torch.dtype, cycle: int = 0
) -> list[list[Named]]:
    """`[rank][microbatch]` -> gradient by parameter name (tied parameters under their first name).

    A parameter that got no gradient has zeros, a frozen one is absent.
    """
    return [
        [_gradient(model, batch(name, rank, j, dtype, cycle)) for j in range(microbatches)]
        for rank in range(ranks)
    ]


def mean_gradient(raw: list[list[Named]]) -> Named:
    """(1/N) * sum over ranks and microbatches, added up in fp64."""
    return {key: mean([[g[key] for g in row] for row in raw]) for key in raw[0][0]}


def expected_gradient(
    name: str, ranks: int, microbatches: int, dtype: torch.dtype, cycle: int = 0
) -> Named:
    """The oracle's gradient, in fp64, of a freshly built model."""
    raw = [
        [_initial_gradient(name, dtype, rank, j, cycle) for j in range(microbatches)]
        for rank in range(ranks)
    ]
    return mean_gradient(raw)


@cache
def _initial_gradient(
    name: str, dtype: torch.dtype, rank: int, microbatch: int, cycle: int
) -> Named:
    """g[r, j] of a freshly built model; kept, since every strategy is compared with the same."""
    return _gradient(build(name, dtype), batch(name, rank, microbatch, dtype, cycle))


def train(
    name: str,
    ranks: int,
    microbatches: int,
    steps: int,
    make_optimizer: MakeOptimizer,
    *,
    clip_norm: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Named, list[float]]:
    """Parameters after `steps` steps, and the gradient norm (before clipping) of each step."""
    model = build(name, dtype)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    norms = []
    for step in range(steps):
        gradient = mean_gradient(raw_gradients(model, name, ranks, microbatches, dtype, step))
        for key, parameter in model.named_parameters():
            parameter.grad = gradient[key].to(dtype) if key in gradient else None
        bound = float("inf") if clip_norm is None else clip_norm
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), bound)))
        optimizer.step()
    return {key: p.detach().clone() for key, p in model.named_parameters()}, norms


def relative_difference(found: Named, expected: Named) -> float:
    """Largest over parameters of ||found - expected|| / ||expected||; names must be the same.

    Where zero is expected, anything else counts as infinitely wrong.
    """
    if found.keys() != expected.keys():
        raise AssertionError(f"parameters {sorted(found)} instead of {sorted(expected)}")
    return max(_relative(found[key].double(), expected[key].double()) for key in expected)


def compare(found: Named, expected: Named, relative: float = 1e-12) -> None:
    """By `relative_difference`.

    Raises:
        AssertionError: not less than `relative`, or NaN.
    """
    error = relative_difference(found, expected)
    assert error < relative, f"off by {error:.3g}, expected less than {relative:.3g}"


def _relative(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        raise AssertionError(f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    return relative(found, expected, float(expected.norm()))


def _gradient(model: nn.Module, inputs: Tensor) -> Named:
    return gradient(model, lambda: loss(model(inputs)))[0]
