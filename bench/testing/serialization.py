"""Answers of ranks as bytes: pickles whose tensors travel as plain bytes.

torch pickles every tensor as an archive of its own, which takes ten times as long for the small
ones that ranks send by the thousand.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def packed(value: Any) -> bytes:
    """`value` by value: strided CPU tensors as their elements, all else as pickle has it."""
    buffer = io.BytesIO()
    _Packer(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """What was packed; tensors have memory of their own."""
    return pickle.loads(content)  # noqa: S301 - from our own ranks


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided or value.requires_grad:
            return NotImplemented
        if value.device.type != "cpu":
            return NotImplemented
        elements = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (bytearray(elements), value.dtype, tuple(value.shape))


def _tensor(elements: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not elements:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(elements, dtype=dtype).view(shape)
