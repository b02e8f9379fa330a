"""`Inspection` of the engines built on torch's own data parallelism."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from bench.engines.inspection import Inspection, LocalRows, local_rows


class StockInspection(Inspection):
    """Of `model`, the wrapped module, whose parameters are plain tensors or DTensors.

    prefix: what the wrapper puts before every name.
    """

    def __init__(self, model: nn.Module, *, prefix: str = "", autocast: bool = True) -> None:
        self.autocast = autocast
        self._model = model
        self._prefix = prefix

    def _parameters(self) -> dict[str, nn.Parameter]:
        named = self._model.named_parameters()
        return {name.removeprefix(self._prefix): parameter for name, parameter in named}

    def gradients(self) -> dict[str, LocalRows | None]:
        """`.grad` of every trainable parameter."""
        return {
            name: None if p.grad is None else local_rows(p.grad)
            for name, p in self._parameters().items()
            if p.requires_grad
        }

    def weights(self) -> dict[str, LocalRows]:
        """The parameters themselves."""
        return {name: local_rows(p.data) for name, p in self._parameters().items()}

    def whole_weights(self) -> dict[str, Tensor]:
        """`full_tensor()` of sharded parameters."""
        return {
            name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
            for name, p in self._parameters().items()
        }

    @torch.no_grad()
    def load_whole_weights(self, weights: Mapping[str, Tensor]) -> None:
        """`load_state_dict`, with whole tensors cut up first where parameters are sharded."""
        own = self._parameters()
        state = {
            self._prefix + name: distribute_tensor(value, p.device_mesh, p.placements)
            if isinstance(p := own[name], DTensor)
            else value
            for name, value in weights.items()
        }
        duplicates = {
            name: self._prefix + first
            for first, parameter in own.items()
            for name, other in self._model.named_parameters(remove_duplicate=False)
            if other is parameter
        }
        state |= {name: state[first] for name, first in duplicates.items() if first in state}
        self._model.load_state_dict(state)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """A call of the model under `no_grad`, without autocast."""
        loss: Tensor = self._model(tokens, targets)
        for module in self._model.modules():
            # What stays gathered after a forward pass could not be loaded into.
            if isinstance(module, FSDPModule):
                module.reshard()
        return loss
