"""Quantised tensors of Transformer Engine in plain torch: `oracle.transformer_engine`.

The attributes are those that layers, optimizers and `mfsdp_core` read and set there. Scales of
MXFP8 are FP32 numbers here, and have no padding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 448.0
_Block = tuple[int | None, int | None]
_WHOLE: _Block = (None, None)

#: Quantizers whose scale was set before.
DELAYED: weakref.WeakSet[Any] = weakref.WeakSet()


class DelayedScaling:
    """One scale per tensor, of an earlier step."""


class Float8CurrentScaling:
    """One scale per tensor."""


class Float8BlockScaling:
    """One scale per 128 x 128."""


class MXFP8BlockScaling:
    """One scale per 1 x 32 of rows and per 32 x 1 of columns."""


@dataclass(eq=False)
class Quantizer:
    """A recipe for one tensor. blocks: under one scale, of rows and of columns.

    is_delayed: by a scale that was set before. rounds: scales up to powers of two.
    """

    blocks: tuple[_Block, _Block] = (_WHOLE, _WHOLE)
    is_delayed: bool = False
    rounds: bool = False
    scale: Tensor = field(default_factory=lambda: torch.ones(1))
    amax: Tensor = field(default_factory=lambda: torch.zeros(1))

    def __post_init__(self) -> None:
        if self.is_delayed:
            DELAYED.add(self)

    def scale_inv(self, maxima: Tensor) -> Tensor:
        """What codes are multiplied by, of the largest magnitude of every block."""
        if self.is_delayed:
            self.amax.copy_(maxima.view(1))
            return self.scale.reciprocal().view_as(maxima)
        found = torch.where(maxima > 0, maxima / LARGEST, 1.0)
        return torch.exp2(torch.log2(found.double()).ceil()).float() if self.rounds else found


class QuantizedTensor(torch.Tensor):
    """A tensor whose values are codes and scales; everything that computes with it decodes it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _quantizer: Quantizer

    @staticmethod
    def __new__(
        cls: Any, shape: Any, dtype: torch.dtype, device: Any = None, **fields: Any
    ) -> QuantizedTensor:
        """A tensor around what is in `fields`."""
        made: QuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=device
        )
        vars(made).update(fields)
        return made

    def __init__(self, *_given: Any, **_fields: Any) -> None:
        """Everything is there already."""

    def _get_quantizer(self) -> Quantizer:
        return self._quantizer

    def detach(self) -> QuantizedTensor:
        """Another one over the same memory."""
        names = type(self).__annotations__
        fields = {name: vars(self)[name] for name in (*names, "_quantizer")}
        return type(self)(self.shape, self.dtype, self.device, **fields)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Codes and scales that a forward pass reads."""
        found = vars(self)
        return found["_rowwise_data"], found["_rowwise_scale_inv"]

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values of the rows."""
        return _decoded(*self.rows(), self._quantizer.blocks[0]).to(dtype or self.dtype)

    def columns(self) -> Tensor:
        """What a backward pass multiplies by."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].detach()
        plain = [a.dequantize() if isinstance(a, QuantizedTensor) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Float8Tensor(QuantizedTensor):
    """One scale for all of it. Columns are the rows, transposed."""

    _data: Tensor
    _transpose: Tensor | None
    _transpose_invalid: bool
    _scale_inv: Tensor

    def rows(self) -> tuple[Tensor, Tensor]:
        """Codes, and the scale as a matrix."""
        return self._data, self._scale_inv.view(1, 1)

    def make_columns(self) -> None:
        """By a copy."""
        self._transpose, self._transpose_invalid = self._data.t().contiguous(), False

    def columns(self) -> Tensor:
        """What a backward pass multiplies by."""
        if self._transpose is None or self._transpose_invalid:
            self.make_columns()
        assert self._transpose is not None
        return _decoded(self._transpose, self._scale_inv.view(1, 1), _WHOLE).t()


class Float8BlockwiseQTensor(QuantizedTensor):
    """Scales of blocks. Columns are the rows, transposed."""

    _rowwise_data: Tensor
    _columnwise_data: Tensor | None
    _rowwise_scale_inv: Tensor
    _columnwise_scale_inv: Tensor | None

    def make_columns(self) -> None:
        """By a copy."""
        self._columnwise_data = self._rowwise_data.t().contiguous()
        self._columnwise_scale_inv = self._rowwise_scale_inv.t().contiguous()

    def columns(self) -> Tensor:
        """What a backward pass multiplies by."""
        if self._columnwise_data is None:
            self.make_columns()
        assert self._columnwise_data is not None
        assert self._columnwise_scale_inv is not None
        block = self._quantizer.blocks[1]
        return _decoded(self._columnwise_data, self._columnwise_scale_inv, block[::-1]).t()


class MXFP8Tensor(QuantizedTensor):
    """Scales of blocks. Columns are codes of their own, in the order of the rows."""

    _rowwise_data: Tensor
    _columnwise_data: Tensor
    _rowwise_scale_inv: Tensor
    _columnwise_scale_inv: Tensor

    def columns(self) -> Tensor:
        """What a backward pass multiplies by."""
        block = self._quantizer.blocks[1]
        return _decoded(self._columnwise_data, self._columnwise_scale_inv, block)


def grid_of(values: Tensor, block: _Block) -> Tensor:
    """The largest magnitude in every block of a matrix."""
    height, width = (size or extent for size, extent in zip(block, values.shape, strict=True))
    padded = F.pad(values.abs(), (0, -values.shape[1] % width, 0, -values.shape[0] % height))
    return padded.view(padded.shape[0] // height, height, -1, width).amax((1, 3))


def _spread(grid: Tensor, block: _Block, shape: torch.Size) -> Tensor:
    for dim, size in enumerate(block):
        grid = grid.repeat_interleave(size or shape[dim], dim)
    return grid[: shape[0], : shape[1]]


def encoded(values: Tensor, scale_inv: Tensor, block: _Block) -> Tensor:
    """Codes of a matrix."""
    scaled = values / _spread(scale_inv, block, values.shape)
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def _decoded(codes: Tensor, scale_inv: Tensor, block: _Block) -> Tensor:
    numbers = codes.view(torch.float8_e4m3fn).float()
    return numbers * _spread(scale_inv, block, codes.shape)


_KINDS: dict[type, tuple[type[QuantizedTensor], Callable[[], Quantizer]]] = {
    DelayedScaling: (Float8Tensor, partial(Quantizer, is_delayed=True)),
    Float8CurrentScaling: (Float8Tensor, Quantizer),
    Float8BlockScaling: (Float8BlockwiseQTensor, partial(Quantizer, ((128, 128), (128, 128)))),
    MXFP8BlockScaling: (MXFP8Tensor, partial(Quantizer, ((1, 32), (32, 1)), rounds=True)),
}


def scale_fields(weight: Any) -> tuple[str, ...]:
    """Of codes that a maximum over ranks decides: rows, and columns that are no copy."""
    if isinstance(weight, Float8Tensor):
        return ("_scale_inv",)
    both = ("_rowwise_scale_inv", "_columnwise_scale_inv")
    return both if isinstance(weight, MXFP8Tensor) else both[:1]


def quantized(values: Tensor, recipe: Any) -> QuantizedTensor:
    """A matrix as weights under `recipe` are kept."""
    kind, quantizer_of = _KINDS[type(recipe)]
    quantizer, matrix = quantizer_of(), values.detach().float()
    scales = [quantizer.scale_inv(grid_of(matrix, block)) for block in quantizer.blocks]
    codes = [encoded(matrix, s, b) for s, b in zip(scales, quantizer.blocks, strict=True)]
    fields: dict[str, Any] = {"_quantizer": quantizer}
    if kind is Float8Tensor:
        fields |= {"_data": codes[0], "_scale_inv": scales[0].view(1)}
        fields |= {"_transpose": codes[0].t().contiguous(), "_transpose_invalid": False}
    else:
        flips = kind is Float8BlockwiseQTensor
        columns, their_scales = (t.t().contiguous() if flips else t for t in (codes[1], scales[1]))
        fields |= {"_rowwise_data": codes[0], "_rowwise_scale_inv": scales[0]}
        fields |= {"_columnwise_data": columns, "_columnwise_scale_inv": their_scales}
    return kind(values.shape, values.dtype, values.device, **fields)
