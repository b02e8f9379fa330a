"""Quantised tensors of Transformer Engine in plain torch: `oracle.transformer_engine`.

The attributes are those that layers, optimizers and `mfsdp_core` read and set there. Scales of
MXFP8 are FP32 numbers here, and have no padding.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 448.0
_Block = tuple[int | None, int | None]

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


class Quantizer:
    """A recipe for one tensor. blocks: under one scale, of rows and of columns."""

    blocks: tuple[_Block, _Block] = ((None, None), (None, None))

    def __init__(self) -> None:
        self.scale, self.amax = torch.ones(1), torch.zeros(1)

    def scale_inv(self, maxima: Tensor) -> Tensor:
        """What codes are multiplied by, of the largest magnitude of every block."""
        return torch.where(maxima > 0, maxima / LARGEST, 1.0)


class Float8Quantizer(Quantizer):
    """Delayed scaling: by a scale that was set before."""

    def __init__(self) -> None:
        super().__init__()
        DELAYED.add(self)

    def scale_inv(self, maxima: Tensor) -> Tensor:
        """The reciprocal of the scale, whatever the values are."""
        self.amax.copy_(maxima.view(1))
        return self.scale.reciprocal().view_as(maxima)


class Float8CurrentScalingQuantizer(Quantizer):
    """By the maximum of now."""


class Float8BlockQuantizer(Quantizer):
    """By that of every block of 128 x 128."""

    blocks = ((128, 128), (128, 128))


class MXFP8Quantizer(Quantizer):
    """By powers of two, along rows and along columns."""

    blocks = ((1, 32), (32, 1))

    def scale_inv(self, maxima: Tensor) -> Tensor:
        """Rounded up to a power of two."""
        return torch.exp2(torch.log2(super().scale_inv(maxima).double()).ceil()).float()


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

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values of the rows."""
        raise NotImplementedError

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
    """One scale for all of it."""

    _data: Tensor
    _transpose: Tensor | None
    _transpose_invalid: bool
    _scale_inv: Tensor

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values of the rows."""
        return _decoded(self._data, self._scale_inv.view(1, 1), (None, None)).to(
            dtype or self.dtype
        )

    def _create_transpose(self) -> None:
        self._transpose, self._transpose_invalid = self._data.t().contiguous(), False

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Make what is asked for and missing."""
        del rowwise_usage
        if columnwise_usage and (self._transpose is None or self._transpose_invalid):
            self._create_transpose()

    def columns(self) -> Tensor:
        """What a backward pass multiplies by."""
        self.update_usage(columnwise_usage=True)
        assert self._transpose is not None
        return _decoded(self._transpose, self._scale_inv.view(1, 1), (None, None)).t()


class Float8BlockwiseQTensor(QuantizedTensor):
    """Scales of blocks. Columns are the rows, transposed."""

    _rowwise_data: Tensor
    _columnwise_data: Tensor | None
    _rowwise_scale_inv: Tensor
    _columnwise_scale_inv: Tensor | None

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values of the rows."""
        block = self._quantizer.blocks[0]
        rows = _decoded(self._rowwise_data, self._rowwise_scale_inv, block)
        return rows.to(dtype or self.dtype)

    def _create_columnwise(self) -> None:
        self._columnwise_data = self._rowwise_data.t().contiguous()
        self._columnwise_scale_inv = self._rowwise_scale_inv.t().contiguous()

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Make what is asked for and missing; drop what is not wanted."""
        del rowwise_usage
        if columnwise_usage and self._columnwise_data is None:
            self._create_columnwise()
        if columnwise_usage is False:
            self._columnwise_data = self._columnwise_scale_inv = None

    def columns(self) -> Tensor:
        """What a backward pass multiplies by."""
        self.update_usage(columnwise_usage=True)
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

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values of the rows."""
        rows = _decoded(self._rowwise_data, self._rowwise_scale_inv, self._quantizer.blocks[0])
        return rows.to(dtype or self.dtype)

    def columns(self) -> Tensor:
        """What a backward pass multiplies by."""
        return _decoded(
            self._columnwise_data, self._columnwise_scale_inv, self._quantizer.blocks[1]
        )


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


_KINDS: dict[type, tuple[type[Quantizer], type[QuantizedTensor]]] = {
    DelayedScaling: (Float8Quantizer, Float8Tensor),
    Float8CurrentScaling: (Float8CurrentScalingQuantizer, Float8Tensor),
    Float8BlockScaling: (Float8BlockQuantizer, Float8BlockwiseQTensor),
    MXFP8BlockScaling: (MXFP8Quantizer, MXFP8Tensor),
}


def scale_fields(weight: Any) -> tuple[str, ...]:
    """Of codes that a maximum over ranks decides: rows, and columns that are no copy."""
    if isinstance(weight, Float8Tensor):
        return ("_scale_inv",)
    both = ("_rowwise_scale_inv", "_columnwise_scale_inv")
    return both if isinstance(weight, MXFP8Tensor) else both[:1]


def quantized(values: Tensor, recipe: Any) -> QuantizedTensor:
    """A matrix as weights under `recipe` are kept."""
    quantizer_type, kind = _KINDS[type(recipe)]
    quantizer, matrix = quantizer_type(), values.detach().float()
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
