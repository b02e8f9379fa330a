"""Whole tensors from the shards of all ranks, in the order that the shards themselves claim."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from bench.engines.inspection import LocalRows


class JoiningError(Exception):
    """The shards of a parameter do not make up one tensor of its shape; says why."""


def joined(name: str, shards: Sequence[LocalRows], shape: tuple[int, ...]) -> Tensor:
    """The whole tensor behind `shards`, one per rank.

    Raises:
        JoiningError: a shard is missing, or together they have another shape.
    """
    by_order: dict[int, LocalRows] = {}
    for shard in shards:
        by_order.setdefault(shard.order, shard)
    parts = {shard.parts for shard in shards}
    if len(parts) != 1 or sorted(by_order) != list(range(parts.copy().pop())):
        raise JoiningError(f"{name}: shards {sorted(by_order)} of {sorted(parts)} on all ranks")
    rows = [by_order[order].rows for order in sorted(by_order)]
    flat = any(shard.flat for shard in shards)
    if not shape or flat:
        rows = [row.reshape(-1) for row in rows]
    full = torch.cat(rows) if len(rows) > 1 else rows[0]
    fits = flat or tuple(full.shape) in {shape, (1,)}
    if full.numel() != prod(shape) or not fits:
        raise JoiningError(
            f"{name}: shards of {[tuple(r.shape) for r in rows]} do not make up {shape}"
        )
    return full.reshape(shape)


def first_row(shards: Sequence[LocalRows], rank: int) -> int:
    """Row of the whole tensor at which the shard of `rank` begins."""
    own = shards[rank]
    before = {p.order: len(_as_rows(p.rows)) for p in shards if p.order < own.order}
    return sum(before.values())


def cut(full: Tensor, start: int, shard: LocalRows) -> Tensor:
    """The rows of `whole` that `shard`, which begins at row `start`, stands for."""
    if shard.parts == 1:
        return full.reshape(shard.rows.shape)
    if shard.flat:
        full = full.flatten()
    rows = _as_rows(full)[start : start + len(_as_rows(shard.rows))]
    return rows.reshape(shard.rows.shape)


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim else tensor.reshape(1)
