"""What the roundings of each strategy must produce, by name (`bench.testing.rounding`)."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.testing.rounding import emulated, reduced
from oracle.reference import Named


def accumulate_then_reduce(
    raw: list[list[Named]],
    main: torch.dtype,
    comm: torch.dtype,
    *,
    total: torch.dtype,
    travels: bool,
    divisor: int | None = None,
    every: bool = False,
) -> Named:
    """no_shard and optim: k gradients added in `main`, one cast to `comm`, reduced, cast back.

    total: in which ranks add up. travels: whether sums are sent once more. divisor: of the sum over
    ranks; None is their number.
    """
    parts = divisor or len(raw)
    return {
        key: emulated(
            [[g[key] for g in row] for row in raw],
            main,
            comm,
            parts,
            every=every,
            total=total,
            travels=travels,
        )
        for key in raw[0][0]
    }


def reduce_then_accumulate(
    raw: list[list[Named]],
    main: torch.dtype,
    comm: torch.dtype,
    *,
    total: torch.dtype,
    travels: bool = False,
    divisor: int | None = None,
) -> Named:
    """optim_grads and optim_grads_params: each gradient cast, reduced, added up in `main`."""
    return accumulate_then_reduce(
        raw, main, comm, total=total, travels=travels, divisor=divisor, every=True
    )


def outer_stage(
    inner: list[Named], main: torch.dtype, comm: torch.dtype, *, total: torch.dtype, travels: bool
) -> Named:
    """Hybrid: what each outer rank accumulated is cast to `comm` once more, summed, cast back.

    The mean over both axes was taken in the inner stage; nothing is divided here.
    """
    return {
        key: reduced([g[key].to(comm) for g in inner], dtype=total, travels=travels).to(main)
        for key in inner[0]
    }


def ulp_distance(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Largest difference in units of `dtype`'s spacing at the largest expected magnitude."""
    scale = expected.double().abs().max().clamp_min(torch.finfo(dtype).tiny)
    spacing = scale * torch.finfo(dtype).eps
    return float((found.double() - expected.double()).abs().max() / spacing)
