"""Transformer Engine in plain torch, as far as the project uses it, with its names and signatures.

A test compares them with those of an installed Transformer Engine. Weights are quantised for real,
by the definitions of the recipes and not by the kernels, whose bits may differ. Products are of
decoded weights and of activations as they are. As on Hopper, a pass that reads columns of a tensor
with one scale makes a transposed copy.

`installed()` puts the stand-in where code imports Transformer Engine from.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oracle.quantised_tensors import (
    DELAYED,
    LARGEST,
    DelayedScaling,
    Float8BlockScaling,
    Float8BlockwiseQTensor,
    Float8CurrentScaling,
    Float8Tensor,
    MXFP8BlockScaling,
    MXFP8Tensor,
    QuantizedTensor,
    encoded,
    grid_of,
    quantized,
    scale_fields,
)

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Linear",
    "MXFP8BlockScaling",
    "MXFP8Tensor",
    "autocast",
    "quantized_model_init",
]

#: The release whose signatures these are.
VERSION = "2.20.2"


@dataclass
class _State:
    quantises: bool = False
    recipe: Any = None
    preserves: bool = False


@dataclass
class Fp8State:
    """What layers run under. phase: of a checkpoint. updates: how often delayed scales followed."""

    enabled: bool = False
    recipe: Any = None
    phase: str = ""
    updates: int = 0


_STATE = _State()
FP8 = Fp8State()


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Modules that are made inside hold quantised weights alone."""
    before = vars(_STATE).copy()
    vars(_STATE).update(
        quantises=enabled,
        recipe=recipe or DelayedScaling(),
        preserves=preserve_high_precision_init_val,
    )
    try:
        yield
    finally:
        vars(_STATE).update(before)


class autocast:  # noqa: N801 - its name there
    """On leaving it, delayed scales follow the maxima that were seen."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Any = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        del calibrating, amax_reduction_group, _graph
        self._enabled, self._recipe = enabled, recipe

    def __enter__(self) -> autocast:
        self._before = FP8.enabled, FP8.recipe
        FP8.enabled, FP8.recipe = self._enabled, self._recipe
        return self

    def __exit__(self, *_error: object) -> None:
        FP8.enabled, FP8.recipe = self._before
        if not (self._enabled and torch.is_grad_enabled()):
            return
        FP8.updates += 1
        for quantizer in DELAYED:
            amax, scale = quantizer.amax, quantizer.scale
            scale.copy_(torch.where(amax > 0, LARGEST / amax, scale))


@contextmanager
def _phase(name: str) -> Iterator[None]:
    FP8.phase = name
    try:
        yield
    finally:
        FP8.phase = ""


def get_activation_recompute_contexts() -> tuple[Any, Any]:
    """For a checkpointed forward pass, and for the same when it is recomputed."""
    return _phase("forward"), _phase("recompute")


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Always: this is no kernel."""
    return (True, "") if return_reason else True


def quantize_master_weights(
    model_weights: Any,
    master_weights: Any,
    start_offsets: Any,
    group: Any,
    fsdp_shard_model_weights: Any = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Quantise this rank's parts, with scales of the whole weights. Collective over `group`."""
    shards = fsdp_shard_model_weights or [None] * len(model_weights)
    wholes, maxima = [], []
    for weight, master, start in zip(model_weights, master_weights, start_offsets, strict=True):
        if hasattr(weight, "clear_high_precision_init_val"):
            weight.clear_high_precision_init_val()
        wholes.append(_whole(weight, master, start))
        blocks = weight._get_quantizer().blocks[: len(scale_fields(weight))]
        maxima += [grid_of(wholes[-1], block) for block in blocks]
    packed = torch.cat([grid.flatten() for grid in maxima])
    dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
    parts = packed.split([grid.numel() for grid in maxima])
    found = iter([part.view(grid.shape) for part, grid in zip(parts, maxima, strict=True)])
    for weight, master, start, shard, whole in zip(
        model_weights, master_weights, start_offsets, shards, wholes, strict=True
    ):
        quantizer = weight._get_quantizer()
        for number, name in enumerate(scale_fields(weight)):
            scales = quantizer.scale_inv(next(found))
            getattr(weight, name).view(scales.shape).copy_(scales)
            if master is not None:
                codes = encoded(whole, scales, quantizer.blocks[number]).view(-1)
                target = _target(weight, name, shard, number)
                own = slice(start, start + master.numel())
                (target if shard is not None else target[own]).copy_(codes[own])
        if not manual_post_all_gather_processing:
            _drop_copies(weight)


def _whole(weight: Any, master: Tensor | None, start: int | None) -> Tensor:
    """The part, among zeros."""
    whole = torch.zeros(weight.numel())
    if master is not None:
        assert start is not None
        end = start + master.numel()
        if start < 0 or end > weight.numel():
            raise ValueError(f"[{start}, {end}) of a weight of {weight.numel()} elements")
        whole[start:end] = master.reshape(-1).to(weight.dtype).float()
    return whole.view(weight.shape)


def _target(weight: Any, scales: str, shard: Any, number: int) -> Tensor:
    """Where codes go: the shard that was given, or the weight's own."""
    if isinstance(shard, Tensor):
        return shard.view(-1)
    codes: Tensor = (
        getattr(weight, scales.replace("scale_inv", "data")) if shard is None else shard[number]
    )
    return codes.view(-1)


def _drop_copies(weight: Any) -> None:
    if isinstance(weight, Float8Tensor):
        weight._transpose_invalid = True
    elif isinstance(weight, Float8BlockwiseQTensor):
        weight._columnwise_data = weight._columnwise_scale_inv = None


def post_all_gather_processing(model_weights: Any) -> None:
    """Make the columns that are copies of rows."""
    for weight in model_weights if isinstance(model_weights, list) else [model_weights]:
        if not isinstance(weight, MXFP8Tensor):
            weight.make_columns()


def clear_columnwise_cache(tensor: Any) -> None:
    """Drop the columns, whether they are a copy or not."""
    for name in ("_columnwise_data", "_columnwise_scale_inv", "_transpose"):
        if hasattr(tensor, name):
            setattr(tensor, name, None)
    if hasattr(tensor, "_transpose_invalid"):
        tensor._transpose_invalid = True


class _Product(torch.autograd.Function):
    """x @ weight.t(), with the weight's gradient where the weight says."""

    @staticmethod
    def forward(ctx: Any, weight: Any, inp: Tensor, fuses: bool) -> Tensor:
        ctx.save_for_backward(inp, weight)
        ctx.fuses, ctx.overwrites = fuses, getattr(weight, "overwrite_main_grad", False)
        if fuses and weight.requires_grad:
            ctx.weight = weakref.ref(weight)
            given = hasattr(weight, "__fsdp_param__")
            ctx.main_grad = weight.get_main_grad if given else lambda: weight.main_grad
        rows = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
        return inp @ rows.to(inp.dtype).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inp, weight = ctx.saved_tensors
        columns = weight.columns() if isinstance(weight, QuantizedTensor) else weight
        of_input = gradient @ columns.to(gradient.dtype)
        of_weight = gradient.flatten(0, -2).t() @ inp.flatten(0, -2)
        if not ctx.needs_input_grad[0]:
            return None, of_input, None
        if not ctx.fuses:
            return of_weight.to(weight.dtype), of_input, None
        origin, target = ctx.weight(), ctx.main_grad()
        origin.main_grad = target
        if ctx.overwrites:
            target.copy_(of_weight)
        else:
            target.add_(of_weight)
        if not hasattr(origin, "grad_added_to_main_grad"):
            return None, of_input, None
        origin.grad_added_to_main_grad = True
        fill = 0.0 if getattr(origin, "zero_out_wgrad", False) else float("nan")
        return torch.full(weight.shape, fill, dtype=weight.dtype), of_input, None


class Linear(nn.Module):
    """A linear layer, under `quantized_model_init` with quantised weights."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        fuse_wgrad_accumulation: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.primary_weights_in_fp8 = _STATE.quantises
        self.preserve_high_precision_init_val = _STATE.preserves
        self.fp8_meta = {"recipe": _STATE.recipe}
        self._init = init_method or (lambda tensor: nn.init.normal_(tensor, 0.0, 0.023))
        values = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
        self.weight = nn.Parameter(values)
        zeros = torch.zeros(out_features, dtype=params_dtype, device=device)
        self.bias = nn.Parameter(zeros) if bias else None
        if not values.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw all values; weights become codes, in parameters that are made anew."""
        if defer_init:
            return
        values = self.weight.data
        values = torch.empty_like(values, device="cpu") if values.is_meta else values
        self._init(values)
        if self.primary_weights_in_fp8:
            self.weight = nn.Parameter(quantized(values, self.fp8_meta["recipe"]))
            if self.preserve_high_precision_init_val:
                _keep(self.weight, values.detach().cpu())
        else:
            self.weight = nn.Parameter(values)
        if self.bias is not None:
            self.bias = nn.Parameter(torch.zeros_like(self.bias, device="cpu"))

    def get_extra_state(self) -> Tensor:
        """What a checkpoint has besides weights: scales, as bytes."""
        return torch.tensor([1, 2, 3], dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Take them, if there are any."""
        if state is not None and state.numel() == 0:
            raise ValueError("expected the bytes of scales")

    def forward(self, inp: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        out: Tensor = _Product.apply(self.weight, inp, self.fuse_wgrad_accumulation)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def _keep(parameter: Any, values: Tensor) -> None:
    parameter._high_precision_init_val = values
    parameter.get_high_precision_init_val = MethodType(_kept, parameter)
    parameter.clear_high_precision_init_val = MethodType(_clear, parameter)


def _kept(parameter: Any) -> Tensor | None:
    return getattr(parameter, "_high_precision_init_val", None)


def _clear(parameter: Any) -> None:
    if hasattr(parameter, "_high_precision_init_val"):
        del parameter._high_precision_init_val


@contextmanager
def installed() -> Iterator[ModuleType]:
    """While it lasts, `transformer_engine` is this stand-in; gives `transformer_engine.pytorch`."""
    own = sys.modules[__name__]
    below = ("", ".pytorch", ".pytorch.tensor", ".pytorch.tensor.utils", ".common.recipe")
    names = [
        f"transformer_engine{name}"
        for name in (*below, ".pytorch.quantized_tensor", ".pytorch.distributed", ".common")
    ]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = made = ModuleType(name)
        made.__path__ = []
        vars(made).update({k: v for k, v in vars(own).items() if not k.startswith("_")})
    try:
        yield sys.modules["transformer_engine.pytorch"]
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
