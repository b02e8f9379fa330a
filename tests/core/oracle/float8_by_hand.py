"""FP8 weights as one process would quantise a whole matrix, block by block, in plain loops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCKS = {
    "delayed": {"forward": (None, None), "backward": (None, None)},
    "current": {"forward": (None, None), "backward": (None, None)},
    "block": {"forward": (128, 128), "backward": (128, 128)},
    "mxfp8": {"forward": (1, 32), "backward": (32, 1)},
}


def decoded(
    recipe: str, direction: str, whole: Tensor, compute: torch.dtype, earlier: list[Tensor]
) -> Tensor:
    """What modules should compute with. earlier: the matrix as it was at every earlier encoding."""
    if whole.dim() < 2:
        return whole.to(compute)
    matrix = whole.to(compute).float().reshape(len(whole), -1)
    rows, columns = (b or n for b, n in zip(BLOCKS[recipe][direction], matrix.shape, strict=True))
    result = torch.empty_like(matrix)
    for top in range(0, matrix.shape[0], rows):
        for left in range(0, matrix.shape[1], columns):
            block = matrix[top : top + rows, left : left + columns]
            largest = float(block.abs().max())
            if recipe == "delayed":
                seen = [float(before.to(compute).abs().max()) for before in earlier[-16:]]
                largest = max(seen, default=0.0)
            scale = (
                torch.tensor(largest, dtype=torch.float32) / 448 if largest else torch.tensor(1.0)
            )
            if recipe == "mxfp8":
                scale = torch.tensor(2.0 ** math.ceil(math.log2(float(scale))))
            codes = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            result[top : top + rows, left : left + columns] = codes.float() * scale
    return result.reshape(whole.shape).to(compute)
