"""Layers of Transformer Engine as storages: what they keep, for a trace on tensors without data.

    cast weights         codes of rows and columns, made by each forward pass, until the backward
    weights kept as codes  the core's; of one scale or in blocks, columns are copied per backward
    input                codes of its columns, until the backward pass; those of rows in a forward
    gradient             codes of rows and columns, within a backward pass

Sizes of codes and scales are those that its quantizers allocate; no release's memory was measured.
Columns are a copy of the rows, as on Hopper; from Blackwell on, codes of one scale have none.
Padding of scales and workspaces are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Sizes(NamedTuple):
    """Elements per byte of codes and per scale, of others than weights and of weights (0: all)."""

    per_byte: int
    per_scale: int
    per_weight_scale: int
    scale: torch.dtype
    kind: str


_RECIPES: Final = {
    "DelayedScaling": _Sizes(1, 0, 0, torch.float32, "Float8Tensor"),
    "Float8CurrentScaling": _Sizes(1, 0, 0, torch.float32, "Float8Tensor"),
    "Float8BlockScaling": _Sizes(1, 128, 128**2, torch.float32, "Float8BlockwiseQTensor"),
    "MXFP8BlockScaling": _Sizes(1, 32, 32, torch.uint8, "MXFP8Tensor"),
    "NVFP4BlockScaling": _Sizes(2, 16, 16, torch.uint8, "NVFP4Tensor"),
}


def _codes(values: Tensor, sizes: _Sizes, *, of_weight: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scales of one order."""
    flat = values.reshape(-1)
    codes = values if sizes.per_byte == 1 else flat[:: sizes.per_byte]
    per_scale = sizes.per_weight_scale if of_weight else sizes.per_scale
    scales = flat[:: per_scale or flat.numel()].to(sizes.scale, copy=True)
    return codes.to(torch.uint8), scales


class QuantizedTensor(torch.Tensor):
    """Codes alone. planes: attributes that the core gathers; `_columns`: a copy of their rows."""

    planes: tuple[str, ...] = ()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, like: Tensor, fields: dict[str, Any]) -> Any:
        """Of the shape and dtype of `like`."""
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)
        vars(made).update(fields)
        return made

    def __init__(self, *_given: Any) -> None:
        """Everything is there already."""

    def detach(self) -> Any:
        """Another one over the same memory."""
        return type(self)(
            self, {name: vars(self)[name] for name in ("_columns", "_scales", *self.planes)}
        )

    def get_high_precision_init_val(self) -> Tensor:
        """As many values."""
        return torch.empty(self.shape, dtype=self.dtype)

    dequantize = get_high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Nothing is kept."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].detach()
        plain = [a.dequantize() if isinstance(a, QuantizedTensor) else a for a in args]
        return func(*plain, **(kwargs or {}))


_KINDS: Final[dict[str, Any]] = {
    name: type(name, (QuantizedTensor,), {"planes": planes})
    for name, planes in (
        ("Float8Tensor", ("_data",)),
        ("Float8BlockwiseQTensor", ("_rowwise_data",)),
        ("MXFP8Tensor", ("_rowwise_data", "_columnwise_data")),
    )
}


def quantize_master_weights(
    weights: Any, masters: Any, _starts: Any, group: Any, codes: Any
) -> None:
    """Fill this rank's codes. Collective: maxima of all scales."""
    maxima = torch.cat([weight._scales.float() for weight in weights])
    dist.all_reduce(maxima, group=group)  # noqa: TID251 - as Transformer Engine does
    for weight, master, own in zip(weights, masters, codes, strict=True):
        if master is not None:
            for plane in own if isinstance(own, tuple) else (own,):
                plane.copy_(master.to(weight.dtype))


def post_all_gather_processing(weights: Any) -> None:
    """Copy the rows, where columns are no codes of their own."""
    for weight in weights:
        if len(weight.planes) == 1 and weight._columns is None:
            weight._columns = torch.empty_like(vars(weight)[weight.planes[0]])


def clear_columnwise_cache(weight: Any) -> None:
    """Drop the copy."""
    weight._columns = None


class _Product(torch.autograd.Function):
    """What a layer keeps and makes."""

    @staticmethod
    def forward(ctx: Any, weight: Any, inputs: Tensor, sizes: _Sizes) -> Tensor:
        is_cast = not isinstance(weight, QuantizedTensor)
        orders = [_codes(weight, sizes, of_weight=True) for _ in range(2 * is_cast)]
        planes = [plane for order in orders for plane in order] or [weight]
        rows = _codes(inputs, sizes)
        ctx.save_for_backward(*_codes(inputs, sizes), *planes)
        ctx.sizes, ctx.shape, ctx.dtype = sizes, weight.shape, weight.dtype
        out = inputs.new_empty((*inputs.shape[:-1], weight.shape[0]))
        del rows
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        columns, *_, weight = ctx.saved_tensors
        if isinstance(weight, QuantizedTensor):
            post_all_gather_processing([weight])
        rows = _codes(gradient, ctx.sizes), _codes(gradient, ctx.sizes)
        of_inputs = gradient.new_empty((*gradient.shape[:-1], ctx.shape[1]))
        of_weight = gradient.new_empty(ctx.shape, dtype=ctx.dtype)
        del rows, columns
        return of_weight, of_inputs, None


class Linear(nn.Module):
    """A linear layer without bias."""

    recipe: Any = None
    quantises = False

    def __init__(
        self, in_features: int, out_features: int, *, params_dtype: torch.dtype, **_: object
    ) -> None:
        super().__init__()
        self.primary_weights_in_fp8 = Linear.quantises
        self.fp8_meta = {"recipe": Linear.recipe}
        self.sizes = _RECIPES[type(Linear.recipe).__name__]
        shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=params_dtype, device="meta"))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Off the meta device; weights become codes, in parameters that are made anew."""
        values = torch.empty_like(self.weight, device="cpu")
        if self.primary_weights_in_fp8:
            kind = _KINDS[self.sizes.kind]
            codes, scales = _codes(values, self.sizes, of_weight=True)
            planes = {
                name: codes if not at else codes.clone() for at, name in enumerate(kind.planes)
            }
            values = kind(values, planes | {"_columns": None, "_scales": scales})
        self.weight = nn.Parameter(values)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        out: Tensor = _Product.apply(self.weight, inputs, self.sizes)
        return out


@contextmanager
def _quantized_model_init(enabled: bool, recipe: Any, _preserve: bool) -> Iterator[None]:
    Linear.quantises, Linear.recipe = enabled, recipe
    yield


@contextmanager
def layers_as_storages() -> Iterator[None]:
    """While it lasts, `transformer_engine` is the layers of this file."""
    shown: dict[str, dict[str, Any]] = {
        "": {},
        ".common": {},
        ".common.recipe": {name: type(name, (), {}) for name in _RECIPES},
        ".pytorch": {
            "Linear": Linear,
            "autocast": lambda **_: nullcontext(),
            "quantized_model_init": _quantized_model_init,
        },
        ".pytorch.distributed": {
            "get_activation_recompute_contexts": lambda: (nullcontext(), nullcontext())
        },
        ".pytorch.quantized_tensor": {"QuantizedTensor": QuantizedTensor},
        ".pytorch.tensor": {},
        ".pytorch.tensor.utils": {
            function.__name__: function
            for function in (
                quantize_master_weights,
                post_all_gather_processing,
                clear_columnwise_cache,
            )
        },
    }
    modules = {f"transformer_engine{name}": ModuleType(name) for name in shown}
    for module, names in zip(modules.values(), shown.values(), strict=True):
        vars(module).update(names, __path__=[])
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)
