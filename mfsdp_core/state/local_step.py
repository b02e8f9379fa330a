"""An optimizer's own step, run on each rank's shards as plain tensors.

Every operation on a DTensor goes through its dispatcher, which costs more than the arithmetic of a
small shard: an AdamW step is ten operations per parameter. An optimizer that treats every element
by itself computes the same numbers on the local tensors, so for those (`ELEMENTWISE`) the step
runs with the local tensors in place of the DTensors; parameters, gradients and state are DTensors
again before it returns. So does any optimizer of torch's where every rank has whole tensors.
Others, and optimizers with step hooks, which may look at parameters, keep the dispatcher.

[Note: pieces] On a CPU the step also goes through a large shard piece by piece: all operations of
one piece, which then lies in the core's cache, before those of the next. Each operation alone would
read the whole shard, its gradient and its state from memory again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from mfsdp_core.shard.dtensor import gather_full, local_tensor, name_of, name_tensor
from mfsdp_core.shard.uneven_shard import own_rows, shard_like
from mfsdp_core.state.optimizer_parameters import (
    ELEMENTWISE,
    are_whole,
    parameters_of,
    standing_in,
)

#: Elements of a piece per thread: in FP32 a weight, a gradient, two moments and a temporary of that
#: size are 1.3 MB.
PIECE_ELEMENTS = 1 << 16

State = dict[str, Any]


class LocalStep:
    """Call it to step `optimizer`; base_step: its own method."""

    def __init__(self, optimizer: torch.optim.Optimizer, base_step: Callable[..., Any]) -> None:
        self._optimizer = optimizer
        self._base_step = base_step

    @property
    def is_local(self) -> bool:
        """Whether the step sees local tensors in place of the optimizer's parameters."""
        hooked = (
            self._optimizer._optimizer_step_pre_hooks
            or self._optimizer._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        )
        return not hooked and (type(self._optimizer) in ELEMENTWISE or self._sees_whole_tensors)

    def __call__(self, *closure: Callable[[], Any]) -> Any:
        """One step; returns what the optimizer's own method does. closure: none if it is local."""
        if not self.is_local:
            return self._base_step(*closure)
        swapped: dict[int, _Swapped] = {}

        def seen(group: State) -> list[torch.Tensor]:
            piece, stand_ins_of_group = self._piece(group), []
            for parameter in group["params"]:
                stand_ins = [parameter]
                if isinstance(parameter, DTensor) and parameter.grad is not None:
                    swap = swapped[id(parameter)] = _Swapped(parameter, self._optimizer, piece)
                    stand_ins = swap.stand_ins
                stand_ins_of_group += stand_ins
            return stand_ins_of_group

        try:
            with standing_in(self._optimizer, seen):
                return self._base_step()
        finally:
            for swap in swapped.values():
                swap.restore()

    @cached_property
    def _sees_whole_tensors(self) -> bool:
        """Whether it is one of torch's, and no parameter is cut."""
        is_torchs = type(self._optimizer).__module__.startswith("torch.optim")
        return is_torchs and are_whole(parameters_of(self._optimizer))

    def _piece(self, group: State) -> int | None:
        """Elements of a piece for one group's parameters, None where they are not cut."""
        uncut = type(self._optimizer) not in ELEMENTWISE
        if uncut or any(group.get(option) for option in ("foreach", "fused", "differentiable")):
            return None
        return PIECE_ELEMENTS * torch.get_num_threads()


class _Swapped:
    """One parameter of the optimizer while local tensors stand in for it.

    piece_elements: cut the shard into pieces of that many elements, None leaves it whole. The first
    step, which makes the state, is always taken whole.
    """

    def __init__(
        self,
        parameter: DTensor,
        optimizer: torch.optim.Optimizer,
        piece_elements: int | None,
    ) -> None:
        self._parameter = parameter
        self._states = optimizer.state
        self._local: torch.Tensor = local_tensor(parameter)
        self._before: State | None = self._states.get(parameter)
        state = {name: local_tensor(value) for name, value in (self._before or {}).items()}
        self._cut = {
            name: value
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape == self._local.shape
        }
        tensors = [self._local, _local_gradient(parameter), *self._cut.values()]
        is_cut = (
            piece_elements is not None
            and bool(self._cut)
            and self._local.device.type == "cpu"
            and self._local.numel() > piece_elements
            and all(tensor.is_contiguous() for tensor in tensors)
        )
        cut = [list(t.view(-1).split(piece_elements)) if is_cut else [t] for t in tensors]
        self.stand_ins, gradients, *pieces = cut
        of_state = dict(zip(self._cut, pieces, strict=True))
        for index, (weight, gradient) in enumerate(zip(self.stand_ins, gradients, strict=True)):
            weight.grad = gradient
            if self._before is not None:  # what has no shape is each piece's own copy
                self._states[weight] = {
                    name: of_state[name][index] if name in of_state else _own(value, index)
                    for name, value in state.items()
                }
        self._states.pop(parameter, None)

    def restore(self) -> None:
        """State under the parameter again, as DTensors where it has the parameter's shape."""
        self._local.grad = None
        afters = [self._states.pop(stand_in, None) for stand_in in self.stand_ins]
        after = afters[0]
        if after is None:
            return
        if len(afters) > 1:  # what is cut was changed in place
            after = {name: self._cut.get(name, value) for name, value in after.items()}
        self._states[self._parameter] = {
            name: self._as_before(name, value) for name, value in after.items()
        }

    def _as_before(self, name: str, value: Any) -> Any:
        before = None if self._before is None else self._before.get(name)
        if before is not None and local_tensor(before) is value:
            return before
        parameter = self._parameter
        # The count of steps is a scalar, which a scalar parameter has the shape of.
        is_shard = isinstance(value, torch.Tensor) and value.shape == self._local.shape
        if not is_shard or name == "step":
            return value
        shard = shard_like(value, parameter)
        name_tensor(shard, f"{name} of {name_of(parameter)}")
        return shard


def _local_gradient(parameter: DTensor) -> torch.Tensor:
    """This rank's rows of the gradient, also of one that a penalty of whole weights has left."""
    gradient: torch.Tensor = local_tensor(parameter.grad)
    if gradient.shape != local_tensor(parameter).shape:
        assert parameter.grad is not None
        return own_rows(gather_full(parameter.grad), parameter).contiguous()
    return gradient


def _own(value: Any, index: int) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and index else value
