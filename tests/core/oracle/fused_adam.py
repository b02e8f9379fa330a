"""Transformer Engine's FusedAdam in plain torch, with its arguments, states and refusals.

The update is that of AdamW, in FP32. States of 8 bits are left out. As there, all of a parameter,
its gradient and its states are DTensors or none of them is, and what loading and saving go through
is not what hooks of the base class see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_HALF_BITS = 16


class FusedAdam(torch.optim.Optimizer):
    """AdamW over DTensors, by their local tensors."""

    def __init__(  # noqa: PLR0913 - its signature there
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        del set_grad_none
        if amsgrad or not adam_w_mode:
            raise RuntimeError("the stand-in knows AdamW alone")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        self.capturable, self.master_weights = capturable, master_weights
        self.master_weight_dtype = master_weight_dtype
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self._step_supports_amp_scaling = capturable
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As there, also where there is no gradient to be zeroed."""
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=set_to_none is not False)
            return
        for group in self.param_groups:
            for p in group["params"]:
                if set_to_none is False:
                    p.decoupled_grad.zero_()
                else:
                    p.decoupled_grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        del grad_scaler
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self._begin(p)
                grad = getattr(p, "decoupled_grad", None) if self.use_decoupled_grad else p.grad
                if grad is None:
                    continue
                values = (grad, *self.state[p].values())
                if any(isinstance(p, DTensor) != isinstance(value, DTensor) for value in values):
                    raise AssertionError(f"[FusedAdam DTensor Disparity] {type(p)} and {values}")
                self._update(_local(p.data), _local(grad).float(), self.state[p], group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """States in FP32, as other tensors than the optimizer has."""
        found = super().state_dict()
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if number in found["state"]:
                states = found["state"][number]
                found["state"][number] = {
                    name: _like(
                        p, _local(value) if name == "master_param" else _local(value).float()
                    )
                    for name, value in states.items()
                }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Reads what it was given, whatever hooks of the base class made of it."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, states in state_dict["state"].items():
            p = parameters[number]
            self.state[p] = {}
            self._begin(p)
            for name, value in states.items():
                _local(self.state[p][name]).copy_(_local(value))

    def _begin(self, p: Any) -> None:
        state, local = self.state[p], _local(p).detach()
        for name, dtype in self._dtypes.items():
            state[name] = _like(p, torch.zeros_like(local, dtype=dtype))
        if self.master_weights:
            halves = self.store_param_remainders and p.dtype is torch.bfloat16
            begin = torch.zeros_like(local, dtype=torch.int16) if halves else local.float().clone()
            state["master_param"] = _like(p, begin)

    def _update(
        self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        master, kept = p, state.get("master_param")
        halves = kept is not None and _local(kept).dtype is torch.int16
        if halves:
            bits = (p.view(torch.int16).int() << _HALF_BITS) + _local(kept).int()
            master = bits.view(torch.float32)
        elif kept is not None and p.dtype is not torch.float32:
            master = _local(kept)
        (first, second), step = group["betas"], group["step"]
        moments = [_local(state[name]) for name in self._dtypes]
        mean = moments[0].float().lerp(grad, 1 - first)
        square = moments[1].float().mul(second).addcmul(grad, grad, value=1 - second)
        moments[0].copy_(mean)
        moments[1].copy_(square)
        size = group["lr"] / (1 - first**step)
        root = (square / (1 - second**step)).sqrt() + group["eps"]
        wanted = master.float() * (1 - group["lr"] * group["weight_decay"]) - size * mean / root
        if halves:
            bits = wanted.view(torch.int32)
            p.copy_(((bits + (1 << (_HALF_BITS - 1))) >> _HALF_BITS).short().view(torch.bfloat16))
            rest = bits - (p.view(torch.int16).int() << _HALF_BITS)
            _local(kept).copy_(rest.short())
            return
        master.copy_(wanted)
        if master is not p:
            p.copy_(wanted)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local


def _like(p: Any, local: Tensor) -> Tensor:
    """Placed as the parameter is."""
    if not isinstance(p, DTensor):
        return local
    return DTensor.from_local(
        local,
        device_mesh=p.device_mesh,
        placements=p.placements,
        shape=p.size(),
        stride=p.stride(),
    )
