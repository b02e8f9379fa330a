"""What a wrong gradient is made of: evidence, instead of a guess at the cause.

A gradient is a sum of c[r, j] * g[r, j] over ranks and microbatches, each c being 1/N if it is
right. Solving for the coefficients tells which contributions were lost, counted twice or scaled.
The answer is given only if it explains the gradient that was found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: The sum must be this close to what was found, relative to it, to count as an explanation.
_RESIDUAL = 1e-4
#: In units of what is right, counts this near to those of a mistake are told as that mistake.
_NEAR = 1e-3
#: A coefficient this far from the right one is worth a line.
_NOTABLE = 1e-3


@dataclass(frozen=True)
class Attribution:
    """microbatch: of the first contribution that counts wrongly, from 0; None if none does."""

    microbatch: int | None
    lines: tuple[str, ...]


def attribute(
    reduced: Sequence[Tensor],
    contributions: Sequence[Sequence[Sequence[Tensor]]],
    others: Sequence[tuple[str, Sequence[Tensor]]] = (),
    *,
    rank: int = 0,
    outer: int = 1,
) -> Attribution | None:
    """Explain `found`; None where no sum of contributions does.

    found: rows of one or several parameters on one rank. contributions: [rank][microbatch] -> the
    same rows. others: named further candidates, such as the gradient of the step before. rank:
    whose rows they are. outer: ranks of the outer axis.
    """
    target = _flat(reduced)
    keys = [(r, j) for r, row in enumerate(contributions) for j in range(len(row))]
    columns = [_flat(contributions[r][j]) for r, j in keys]
    columns += [_flat(tensors) for _, tensors in others]
    if not torch.isfinite(target).all() or target.numel() < 2 * len(columns):
        return None
    basis = torch.stack(columns, dim=1)
    solution = torch.linalg.lstsq(basis, target.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    size = max(float(target.norm()), float(basis.norm()) * 1e-12)
    if size == 0 or float((basis @ solution - target).norm()) > _RESIDUAL * size:
        return None
    counts = solution.tolist()
    told = _told(keys, counts, 1.0 / len(contributions), [name for name, _ in others])
    if any(abs(count) > _NOTABLE for count in counts[len(keys) :]):
        return told
    of_rank = [
        [n * len(contributions) for (r, _), n in zip(keys, counts, strict=False) if r == index]
        for index in range(len(contributions))
    ]
    return Attribution(told.microbatch, (*_mistakes(of_rank, rank, outer), *told.lines))


def _mistakes(counts: Sequence[Sequence[float]], own: int, outer: int) -> list[str]:
    """Simple mistakes that give just these counts; none where nothing is wrong.

    counts: by [rank][microbatch], 1 where a contribution is right. own: whose rows they are.
    """
    ranks, microbatches = len(counts), len(counts[0])

    def gives(count: Callable[[int, int], float]) -> bool:
        wanted = [[float(count(r, j)) for j in range(microbatches)] for r in range(ranks)]
        return all(
            abs(texts - right) <= _NEAR * max(1.0, right)
            for of_rank, row in zip(counts, wanted, strict=True)
            for texts, right in zip(of_rank, row, strict=True)
        )

    if gives(lambda _r, _j: 1):
        return []
    texts = [text for text, count in _candidates(ranks, microbatches, own, outer) if gives(count)]
    return [*texts[:1], *(f"or {text}" for text in texts[1:])]


def _candidates(
    ranks: int, microbatches: int, own: int, outer: int
) -> list[tuple[str, Callable[[int, int], float]]]:
    """What a mistake looks like and where to look, and the counts that it gives."""
    inner, last = ranks // outer, microbatches - 1

    def is_near(rank: int) -> bool:
        return rank // inner == own // inner

    alone = "as if this rank's own contribution alone had been taken"
    return [
        ("as if not divided by the ranks: the divisor of the reduction", lambda _r, _j: ranks),
        (
            "as if divided by the ranks twice: an average in the collective, and a divisor",
            lambda _r, _j: 1 / ranks,
        ),
        (
            "as if divided by the microbatches: the scale of the loss",
            lambda _r, _j: 1 / microbatches,
        ),
        (
            "as if divided by the inner ranks alone: the divisor of the outer stage",
            lambda _r, _j: outer,
        ),
        ("as if every contribution was added twice", lambda _r, _j: 2),
        ("as if nothing was reduced: the buffer is empty", lambda _r, _j: 0),
        (f"{alone}: no reduction over the ranks", lambda r, _j: r == own),
        (f"{alone}, and not divided", lambda r, _j: ranks * (r == own)),
        (
            "as if reduced over the inner ranks alone: the outer stage did not run",
            lambda r, _j: is_near(r),
        ),
        (
            "as if averaged over the inner ranks alone: the outer stage did not run",
            lambda r, _j: outer * is_near(r),
        ),
        (
            "as if the last microbatch alone was kept: the accumulator was overwritten",
            lambda _r, j: j == last,
        ),
        *(
            (
                f"as if rank {lost}'s contribution was lost: it sent zeros, or was not waited for",
                lambda r, _j, lost=lost: r != lost,
            )
            for lost in range(ranks)
        ),
        *(
            (f"as if microbatch {lost + 1} was lost", lambda _r, j, lost=lost: j != lost)
            for lost in range(microbatches)
        ),
        (
            "as if the accumulator was reduced after every microbatch and not cleared",
            lambda _r, j: microbatches - j,
        ),
    ]


def _told(
    keys: list[tuple[int, int]], solution: list[float], right: float, others: list[str]
) -> Attribution:
    ranks = 1 + max(rank for rank, _ in keys)
    wrong: dict[int, dict[int, str]] = {}
    for (rank, microbatch), factor in zip(keys, solution, strict=False):
        if abs(factor - right) > _NOTABLE * right:
            wrong.setdefault(microbatch, {})[rank] = _times(factor)
    lines: list[str] = []
    for microbatch, counts in sorted(wrong.items()):
        what = f"gradient of microbatch {microbatch + 1} counts"
        if len(counts) == ranks > 1 and len(set(counts.values())) == 1:
            lines.append(f"every rank's {what} {counts[0]} times, expected {right:.4g}")
            continue
        lines += [f"rank {r}'s {what} {n} times, expected {right:.4g}" for r, n in counts.items()]
    lines += [
        f"it holds {_times(factor)} times {name}"
        for name, factor in zip(others, solution[len(keys) :], strict=True)
        if abs(factor) > _NOTABLE
    ]
    return Attribution(min(wrong, default=None), tuple(lines))


def _times(count: float) -> str:
    return f"{0.0 if abs(count) < _NOTABLE**2 else count:.4g}"


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])
