"""Optimizers that keep gradients or weights of their own, as Transformer Engine's FusedAdam.

They are known by their attributes: `use_decoupled_grad` (whether gradients are read from
`decoupled_grad`), `master_weights` (whether the optimizer keeps a copy of every weight), and a
`step` that takes the loss scale as an argument.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError
from mfsdp_core.shard.dtensor import local_tensor
from mfsdp_core.state.local_step import ELEMENTWISE


def check_gradients_are_read(optimizer: torch.optim.Optimizer, owners: Iterable[Any]) -> None:
    """Refuse an optimizer that looks for gradients where there are none: it would train nothing.

    Raises:
        ConfigurationError: it reads `grad` and the model attaches `decoupled_grad`, or vice versa.
    """
    known = hasattr(optimizer, "use_decoupled_grad") or type(optimizer) in ELEMENTWISE
    reads = bool(getattr(optimizer, "use_decoupled_grad", False))
    for owner in owners if known else ():
        attaches = owner.decouples_gradients
        if attaches != reads:
            places = {True: "decoupled_grad", False: "grad"}
            raise ConfigurationError(
                f"{type(optimizer).__name__} reads gradients from .{places[reads]}, and the model "
                f"attaches them as .{places[attaches]}: nothing would be trained. Pass "
                f"use_decoupled_grad={reads} to fully_shard_model, or use another optimizer."
            )


def warn_of_two_main_weights(optimizer: Any) -> None:
    """Say what a copy of FP32 main weights costs, which nothing needs (Megatron-LM#4133)."""
    if getattr(optimizer, "master_weights", False) is not True:
        return
    kept = getattr(optimizer, "master_weight_dtype", torch.float32)
    shards = [local_tensor(p) for group in optimizer.param_groups for p in group["params"]]
    wasted = sum(shard.numel() for shard in shards if shard.dtype == torch.float32) * kept.itemsize
    if wasted:
        warnings.warn(
            f"{type(optimizer).__name__}(master_weights=True) keeps a second copy of FP32 main "
            f"weights: {wasted} B on this rank. Leave it at False, or make the model's own weights "
            "the main ones: MixedPrecisionPolicy(main_params_dtype=None).",
            RuntimeWarning,
            stacklevel=4,
        )


def refuse_loss_scale(optimizer: Any) -> None:
    """At a step: refuse a loss scale that would not reach the optimizer.

    Raises:
        CapabilityNotBuiltError: a GradScaler has left its scale to a step that takes it otherwise.
    """
    if not getattr(optimizer, "capturable", False) or not hasattr(optimizer, "grad_scale"):
        return
    if "grad_scaler" in inspect.signature(type(optimizer).step).parameters:
        raise CapabilityNotBuiltError(
            f"{type(optimizer).__name__}(capturable=True) takes a GradScaler as an argument of "
            "step(), which is not passed on: gradients would stay scaled. Call "
            "scaler.unscale_(optimizer) with capturable=False, or train in BF16."
        )


def zero_decoupled(optimizer: torch.optim.Optimizer) -> bool:
    """Zero gradients of an optimizer that fails where there are none; whether it was such a one."""
    if not getattr(optimizer, "use_decoupled_grad", False):
        return False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = getattr(parameter, "decoupled_grad", None)
            if gradient is not None:
                local_tensor(gradient).zero_()
    return True
