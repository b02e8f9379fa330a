"""Gathering shards whose lengths differ between ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_rows(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenation over ranks, along dim 0, of `local` (shape [rows of this rank, ...]).

    Collective: every rank of `group` must call it, with equal trailing dimensions and dtype. Two
    collectives: the row counts, then the rows padded to the largest count.
    """
    if group.size() == 1:
        return local.clone()
    rows = row_counts(local.shape[0], group, local.device)
    padded = local.new_zeros((max(rows), *local.shape[1:]))
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


def row_counts(rows: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """`rows` of every rank of `group`, in its order. Collective."""
    count = torch.tensor([rows], dtype=torch.int64, device=device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    dist.all_gather(counts, count, group=group)
    return [int(entry.item()) for entry in counts]


def largest_over_ranks(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The largest of each element of `value`, in place, over the ranks of `group`."""
    if group.size() > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value


def sum_over_ranks(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`value`, summed in place over the ranks of `group`."""
    if group.size() > 1:
        dist.all_reduce(value, group=group)
    return value
