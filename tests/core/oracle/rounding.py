"""Emulated reductions: what the roundings of each strategy must produce, bit for bit where defined.

The sum over ranks is taken in fp32 and rounded once. For two ranks that is what every transport
does; for more, a ring rounds the partial sums too, and the result may differ by an ulp per hop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.reference import Named


def accumulate_then_reduce(raw: list[list[Named]], main: torch.dtype, comm: torch.dtype) -> Named:
    """no_shard and optim: k gradients added in `main`, one cast to `comm`, reduced, cast back."""
    return {
        key: _reduced([_accumulated([g[key] for g in row], main).to(comm) for row in raw]).to(main)
        for key in raw[0][0]
    }


def reduce_then_accumulate(raw: list[list[Named]], main: torch.dtype, comm: torch.dtype) -> Named:
    """optim_grads and optim_grads_params: each gradient cast, reduced, added up in `main`."""
    microbatches = range(len(raw[0]))
    return {
        key: _accumulated(
            [_reduced([row[j][key].to(comm) for row in raw]) for j in microbatches], main
        )
        for key in raw[0][0]
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


def _reduced(contributions: list[Tensor]) -> Tensor:
    wide = torch.float64 if contributions[0].dtype == torch.float64 else torch.float32
    scaled = [(c / len(contributions)).to(wide) for c in contributions]
    return torch.stack(scaled).sum(dim=0).to(contributions[0].dtype)
