"""Emulated reductions: what the roundings of each strategy must produce, bit for bit where defined.

The sum over ranks is taken in fp32, in rank order. Native collectives round it to the communication
dtype: for two ranks exactly once; for more, a ring rounds the partial sums too, and the result may
differ by an ulp per hop. Direct exchange hands the fp32 sum on (`rounds_sum` False), on any number
of ranks, except where the sum itself travels once more (all-reduce).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.reference import Named


def accumulate_then_reduce(
    raw: list[list[Named]],
    main: torch.dtype,
    comm: torch.dtype,
    *,
    rounds_sum: bool,
    divisor: int | None = None,
) -> Named:
    """no_shard and optim: k gradients added in `main`, one cast to `comm`, reduced, cast back.

    divisor: of the sum over ranks; None is their number.
    """

    def contributions(key: str) -> list[Tensor]:
        return [_accumulated([g[key] for g in row], main).to(comm) for row in raw]

    return {
        key: _reduced(contributions(key), divisor, rounds_sum=rounds_sum).to(main)
        for key in raw[0][0]
    }


def reduce_then_accumulate(
    raw: list[list[Named]],
    main: torch.dtype,
    comm: torch.dtype,
    *,
    rounds_sum: bool,
    divisor: int | None = None,
) -> Named:
    """optim_grads and optim_grads_params: each gradient cast, reduced, added up in `main`."""

    def contributions(key: str, microbatch: int) -> list[Tensor]:
        return [row[microbatch][key].to(comm) for row in raw]

    return {
        key: _accumulated(
            [
                _reduced(contributions(key, j), divisor, rounds_sum=rounds_sum)
                for j in range(len(raw[0]))
            ],
            main,
        )
        for key in raw[0][0]
    }


def outer_stage(
    inner: list[Named], main: torch.dtype, comm: torch.dtype, *, rounds_sum: bool
) -> Named:
    """Hybrid: what each outer rank accumulated is cast to `comm` once more, summed, cast back.

    The mean over both axes was taken in the inner stage; nothing is divided here.
    """
    return {
        key: _reduced([g[key].to(comm) for g in inner], 1, rounds_sum=rounds_sum).to(main)
        for key in inner[0]
    }


def ulp_distance(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Largest difference in units of `dtype`'s spacing at the largest expected magnitude."""
    scale = expected.double().abs().max().clamp_min(torch.finfo(dtype).tiny)
    spacing = scale * torch.finfo(dtype).eps
    return float((found.double() - expected.double()).abs().max() / spacing)


def _accumulated(gradients: list[Tensor], main: torch.dtype) -> Tensor:
    total = torch.zeros(gradients[0].shape, dtype=main)
    for gradient in gradients:
        total.add_(gradient)
    return total


def _reduced(contributions: list[Tensor], divisor: int | None, *, rounds_sum: bool) -> Tensor:
    wide = torch.float64 if contributions[0].dtype == torch.float64 else torch.float32
    total = torch.zeros_like(contributions[0], dtype=wide)
    for contribution in contributions:
        total += (contribution / (divisor or len(contributions))).to(wide)
    return total.to(contributions[0].dtype) if rounds_sum else total
