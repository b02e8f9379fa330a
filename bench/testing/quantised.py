"""FP8 weights as one process would quantise a whole matrix, by none of the code under test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

#: Rows and columns under one scale, None for all of them: in a forward, in a backward pass.
BLOCKS: Final[dict[str, tuple[tuple[int | None, int | None], tuple[int | None, int | None]]]] = {
    "delayed": ((None, None), (None, None)),
    "current": ((None, None), (None, None)),
    "block": ((128, 128), (128, 128)),
    "mxfp8": ((1, 32), (32, 1)),
}
#: The largest E4M3 number.
_LARGEST = 448.0
#: Steps that delayed scaling looks back at.
_HISTORY = 16


def reads_two(recipe: str) -> bool:
    """Whether forward and backward passes read different numbers."""
    forward, backward = BLOCKS.get(recipe, ((), ()))
    return forward != backward


def quantised(
    recipe: str,
    full: Tensor,
    compute: torch.dtype,
    earlier: Sequence[Tensor] = (),
    *,
    backward: bool = False,
) -> Tensor:
    """What modules should compute with. earlier: the matrix as it was at every earlier encoding.

    Vectors, and everything under the recipe `none`, are cast alone.
    """
    if recipe == "none" or full.dim() < 2 or not full.numel():  # noqa: PLR2004 - a matrix
        return full.to(compute)
    matrix = full.to(compute).float().reshape(len(full), -1)
    rows, columns = (
        size or extent for size, extent in zip(BLOCKS[recipe][backward], matrix.shape, strict=True)
    )
    padded = F.pad(matrix, (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, -1, columns)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    if recipe == "delayed":
        maxima = [before.to(compute).float().abs().max() for before in earlier[-_HISTORY:]]
        largest = torch.stack(maxima).max().expand_as(largest) if maxima else largest * 0
    scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
    if recipe == "mxfp8":
        scale = torch.exp2(torch.log2(scale.double()).ceil()).float()
    codes = (blocks / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    decoded = (codes.float() * scale).reshape(padded.shape)
    return decoded[: matrix.shape[0], : matrix.shape[1]].reshape(full.shape).to(compute)
