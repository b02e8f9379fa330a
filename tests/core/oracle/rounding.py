"""What the roundings of each strategy must produce, by name.

Ranks add up in rank order, in a dtype that holds that of the wire, and hand on what has it, except
where the sum itself travels once more (all-reduce). Direct exchange does exactly that. Native
collectives add up in the dtype of the wire: so for two ranks; for more in an order of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.testing.rounding import accumulated, sent
from oracle.reference import Named


def reduced(contributions: Sequence[Tensor], *, dtype: torch.dtype, travels: bool) -> Tensor:
    """The sum over ranks, in `dtype`, of what each sent."""
    total = torch.zeros_like(contributions[0], dtype=dtype)
    for contribution in contributions:
        total += contribution.to(dtype)
    return total.to(contributions[0].dtype) if travels else total


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
    parts, found = divisor or len(raw), {}
    for key in raw[0][0]:
        rows = [[g[key] for g in row] for row in raw]
        reductions = sent(rows, main, comm, parts, every=every)
        sums = [reduced(one, dtype=total, travels=travels) for one in reductions]
        found[key] = accumulated(sums, main)
    return found


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
