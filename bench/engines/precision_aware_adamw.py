"""AdamW for weights, gradients and moments of different dtypes.

The CPU counterpart of a precision-aware fused Adam: it reads `decoupled_grad`, whose dtype need not
be the weight's, keeps its moments in a dtype of their own, and computes in FP32 (FP64 for FP64
weights). `master_weights` makes it keep a second, full-precision copy of every weight, which is a
waste where the sharded weights are the main weights already (NVIDIA/Megatron-LM#4133).

[Note: remainders] `store_remainders` keeps, with a BF16 weight, the lower half of the FP32 weight
that it was rounded from, as a signed 16-bit integer: FP32 bits are 65536 * the weight's + it. So
two bytes more train as FP32 weights do, where a copy takes four. A tie rounds away from zero, and
not to even as elsewhere. Transformer Engine's FusedAdam names it `store_param_remainders`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bench.engines.dtypes import local_tensor

_HALF_BITS = 16


class PrecisionAwareAdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay; the update is that of `torch.optim.AdamW`."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        state_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        store_remainders: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        if store_remainders and master_weights:
            raise ValueError("store_remainders is instead of master_weights: set one of them")
        self._state_dtype = state_dtype
        self._store_remainders = store_remainders
        self._master_weights = master_weights

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a `decoupled_grad`, or else a `grad`."""
        del closure  # gradients are finished before the step
        for group in self.param_groups:
            for parameter in group["params"]:
                decoupled = getattr(parameter, "decoupled_grad", None)
                gradient = parameter.grad if decoupled is None else decoupled
                if gradient is not None:
                    self._update(parameter, gradient, group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also drop the decoupled gradients, which live in the caller's buffers."""
        super().zero_grad(set_to_none=set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                if getattr(parameter, "decoupled_grad", None) is not None:
                    parameter.decoupled_grad = None

    def _new_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(parameter, dtype=self._state_dtype)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self._state_dtype)
        if self._master_weights:
            state["master_param"] = parameter.detach().clone().to(_compute_dtype(parameter))
        if self._store_remainders:
            if parameter.dtype != torch.bfloat16:
                raise ValueError(f"store_remainders is for bfloat16 weights, not {parameter.dtype}")
            state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
        return state

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter] or self._new_state(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        compute = _compute_dtype(parameter)
        stored = local_tensor(state["master_param"] if self._master_weights else parameter.detach())
        weight = stored.to(compute)
        if self._store_remainders:
            weight = joined(stored, local_tensor(state["remainder"]))
        grad = local_tensor(gradient).to(compute)
        first, second = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
        mean = first.to(compute).lerp(grad, 1 - beta1)
        square = second.to(compute).mul(beta2).addcmul(grad, grad, value=1 - beta2)
        first.copy_(mean)
        second.copy_(square)
        size = group["lr"] / (1 - beta1 ** state["step"])
        scale = (square.sqrt() / (1 - beta2 ** state["step"]) ** 0.5).add_(group["eps"])
        updated = (weight * (1 - group["lr"] * group["weight_decay"])).addcdiv_(
            mean, scale, value=-size
        )
        if self._store_remainders:
            split_into(updated, stored, local_tensor(state["remainder"]))
            return
        if self._master_weights:
            stored.copy_(updated)
        local_tensor(parameter.detach()).copy_(updated)


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 weight behind a BF16 one, by [Note: remainders]."""
    upper = weight.view(torch.int16).to(torch.int32) << _HALF_BITS
    return (upper + remainder.to(torch.int32)).view(torch.float32)


def split_into(value: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write an FP32 tensor into a BF16 one and its remainder."""
    bits = value.view(torch.int32)
    upper = (bits + (1 << (_HALF_BITS - 1))) >> _HALF_BITS
    remainder.copy_(bits - (upper << _HALF_BITS))
    weight.copy_(upper.to(torch.int16).view(torch.bfloat16))


def _compute_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
