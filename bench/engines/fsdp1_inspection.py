"""`Inspection` of the engine `fsdp1`, whose shards are stretches of flat parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from bench.engines.inspection import LocalRows
from bench.engines.stock_inspection import StockInspection

_WRAPPER = "_fsdp_wrapped_module."


def flat_parameters(model: FullyShardedDataParallel) -> list[tuple[Any, FullyShardedDataParallel]]:
    """The handle of every flat parameter, with the instance that it belongs to; the root's first.

    Handles are private to torch; the only public way to their sizes and gradients is a gather.
    """
    instances = FullyShardedDataParallel.fsdp_modules(model)
    return [(one._handle, one) for one in instances if one._handle is not None]


class Fsdp1Inspection(StockInspection):
    """Of `model`, the root instance."""

    def __init__(self, model: FullyShardedDataParallel) -> None:
        super().__init__(model, autocast=False)
        self._fsdp = model

    def _parameters(self) -> dict[str, nn.Parameter]:
        named = self._fsdp.named_parameters()
        return {name.replace(_WRAPPER, ""): parameter for name, parameter in named}

    def _shards(self) -> dict[int, tuple[Any, FullyShardedDataParallel]]:
        """By the identity of a parameter, the flat one that it is a view of."""
        return {
            id(parameter): (handle.flat_param, instance)
            for handle, instance in flat_parameters(self._fsdp)
            for parameter in handle.flat_param._params
        }

    def gradients(self) -> dict[str, LocalRows | None]:
        """`.grad` of every trainable parameter; where a rank has no element of it, an empty one."""
        shards = self._shards()
        found: dict[str, LocalRows | None] = {}
        for name, p in self._parameters().items():
            flat, _ = shards[id(p)]
            grad = p.grad
            if grad is None and flat.grad is not None and p.numel() == 0:
                grad = torch.empty_like(p)
            if p.requires_grad:
                found[name] = None if grad is None else _rows(grad, shards[id(p)])
        return found

    def weights(self) -> dict[str, LocalRows]:
        """The views of flat shards that the optimizer updates."""
        shards = self._shards()
        return {name: _rows(p.data, shards[id(p)]) for name, p in self._parameters().items()}

    def whole_weights(self) -> dict[str, Tensor]:
        """Torch's full state dict."""
        options = StateDictOptions(full_state_dict=True)
        state: dict[str, Any] = get_model_state_dict(self._fsdp, options=options)
        return {name: state[name] for name in self._parameters()}

    def load_whole_weights(self, weights: Mapping[str, Tensor]) -> None:
        """`load_state_dict` of a full state dict, strict."""
        own = self._parameters()
        named = self._fsdp.named_parameters(remove_duplicate=False)
        names = {id(p): name for name, p in own.items()}
        state = {
            other.replace(_WRAPPER, ""): weights[names[id(p)]]
            for other, p in named
            if names[id(p)] in weights
        }
        with FullyShardedDataParallel.state_dict_type(self._fsdp, StateDictType.FULL_STATE_DICT):
            self._fsdp.load_state_dict(state)


def _rows(tensor: Tensor, shard: tuple[Any, FullyShardedDataParallel]) -> LocalRows:
    """Whole tensors where the instance shards nothing."""
    _, instance = shard
    handle: Any = instance._handle
    if not handle.uses_sharded_strategy:
        return LocalRows(tensor.detach())
    group = instance.process_group
    order, parts = dist.get_rank(group), dist.get_world_size(group)
    return LocalRows(tensor.detach().flatten(), order, parts, flat=True)
