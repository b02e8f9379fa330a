"""An optimizer's own step, run on each rank's shards as plain tensors.

Every operation on a DTensor goes through its dispatcher, which costs more than the arithmetic of a
small shard: an AdamW step is ten operations per parameter. An optimizer that treats every element
by itself computes the same numbers on the local tensors, so for those (`ELEMENTWISE`) the step
runs with the local tensors in place of the DTensors; parameters, gradients and state are DTensors
again before it returns. Others, and optimizers with step hooks, which may look at parameters, keep
the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

#: Optimizers whose update of an element depends on nothing but that element's own history.
ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)

State = dict[str, Any]


class LocalStep:
    """Call it to step `optimizer`; base_step: its own method."""

    def __init__(self, optimizer: torch.optim.Optimizer, base_step: Callable[[], Any]) -> None:
        self._optimizer = optimizer
        self._base_step = base_step

    def __call__(self) -> None:
        """One step."""
        if not self._is_elementwise():
            self._base_step()
            return
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        swapped = [_Swapped(p, self._optimizer) for params in whole for p in params if _swaps(p)]
        local = {id(one.parameter): one.local for one in swapped}
        try:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = [local.get(id(p), p) for p in params]
            self._base_step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
            for one in swapped:
                one.restore()

    def _is_elementwise(self) -> bool:
        hooked = (
            self._optimizer._optimizer_step_pre_hooks
            or self._optimizer._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        )
        return type(self._optimizer) in ELEMENTWISE and not hooked


class _Swapped:
    """One parameter of the optimizer while its local tensor stands in for it."""

    def __init__(self, parameter: DTensor, optimizer: torch.optim.Optimizer) -> None:
        self.parameter = parameter
        self._states = optimizer.state
        self.local = _local(parameter)
        self.local.grad = None if parameter.grad is None else _local(parameter.grad)
        self._before: State | None = self._states.pop(parameter, None)
        if self._before is not None:
            self._states[self.local] = {k: _local(v) for k, v in self._before.items()}

    def restore(self) -> None:
        """State under the parameter again, as DTensors where it has the parameter's shape."""
        self.local.grad = None
        after = self._states.pop(self.local, None)
        if after is not None:
            self._states[self.parameter] = {
                name: self._as_before(name, value) for name, value in after.items()
            }

    def _as_before(self, name: str, value: Any) -> Any:
        before = None if self._before is None else self._before.get(name)
        if before is not None and _local(before) is value:
            return before
        parameter = self.parameter
        # The count of steps is a scalar, which a scalar parameter has the shape of.
        is_shard = isinstance(value, torch.Tensor) and value.shape == self.local.shape
        if not is_shard or name == "step":
            return value
        return DTensor.from_local(
            value,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def _swaps(parameter: torch.Tensor) -> TypeGuard[DTensor]:
    return isinstance(parameter, DTensor) and parameter.grad is not None


def _local(value: Any) -> Any:
    """The tensor behind a DTensor itself, not a view of it that autograd follows."""
    return value._local_tensor if isinstance(value, DTensor) else value
