"""Whole tensors from the pieces of all ranks, in the order that the pieces themselves claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bench.engines.inspection import Piece

Pieces = Mapping[str, Piece | None]


class JoiningError(Exception):
    """The pieces of a parameter do not make up one tensor of its shape; says why."""


def joined(name: str, pieces: Sequence[Piece], shape: tuple[int, ...]) -> Tensor:
    """The whole tensor behind `pieces`, one per rank.

    Raises:
        JoiningError: a piece is missing, or together they have another shape.
    """
    by_order: dict[int, Piece] = {}
    for piece in pieces:
        by_order.setdefault(piece.order, piece)
    parts = {piece.parts for piece in pieces}
    if len(parts) != 1 or sorted(by_order) != list(range(parts.copy().pop())):
        raise JoiningError(f"{name}: pieces {sorted(by_order)} of {sorted(parts)} on all ranks")
    rows = [by_order[order].rows for order in sorted(by_order)]
    if not shape:
        rows = [row.reshape(-1) for row in rows]
    whole = torch.cat(rows) if len(rows) > 1 else rows[0]
    if whole.numel() != _elements(shape) or tuple(whole.shape) not in {shape, (1,)}:
        raise JoiningError(
            f"{name}: pieces of {[tuple(r.shape) for r in rows]} do not make up {shape}"
        )
    return whole.reshape(shape)


def first_row(name: str, pieces: Sequence[Piece], rank: int) -> int:
    """Row of the whole tensor at which the piece of `rank` begins."""
    del name
    own = pieces[rank]
    before = {p.order: len(_as_rows(p.rows)) for p in pieces if p.order < own.order}
    return sum(before.values())


def cut(whole: Tensor, start: int, piece: Piece) -> Tensor:
    """The rows of `whole` that `piece`, which begins at row `start`, stands for."""
    if piece.parts == 1:
        return whole.reshape(piece.rows.shape)
    rows = _as_rows(whole)[start : start + len(_as_rows(piece.rows))]
    return rows.reshape(piece.rows.shape)


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim else tensor.reshape(1)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
