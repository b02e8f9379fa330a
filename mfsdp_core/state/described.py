"""What `state_dict()` of sharded modules and optimizers returns: shards that say where they lie.

See [Note: analytic chunks]. The description is there whatever `preproc_state_dict_for_dcp_ckpt`
says, since it costs no communication, and without it a checkpoint would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.shard.chunk import describe_chunk, offsets_of
from mfsdp_core.shard.dtensor import without_offset
from mfsdp_core.shard.uneven_shard import cut_like
from mfsdp_core.state.owner import numbered


def describe_modules(modules: Iterable[nn.Module]) -> None:
    """Make the state dict of every module in `modules` hold described shards."""
    known: set[int] = set()
    for module in modules:
        if id(module) not in known:
            known.add(id(module))
            module.register_state_dict_post_hook(_describe_parameters)


def describe_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make the state dict of `optimizer` hold described shards."""
    optimizer.register_state_dict_post_hook(_describe_state)
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return
    base = optimizer.state_dict  # one that makes other tensors of what hooks have seen

    def state_dict() -> dict[str, Any]:
        found = base()
        for number, parameter in numbered(optimizer, found):
            for value in found["state"].get(number, {}).values():
                describe_like(cut_like(value, parameter), parameter)
        return found

    optimizer.state_dict = state_dict  # type: ignore[method-assign]


def describe_like(value: object, parameter: torch.Tensor) -> None:
    """Describe `value` if it is sharded as `parameter` is: its gradient or optimizer state."""
    offsets = offsets_of(parameter)
    if offsets is not None and isinstance(value, DTensor) and value.shape == parameter.shape:
        describe_chunk(value, offsets)


def _describe_parameters(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    """Post hook: values share memory with the model, and can be saved and copied."""
    for attribute, parameter in module._parameters.items():
        value = state_dict.get(prefix + attribute)
        if parameter is None or offsets_of(parameter) is None or not isinstance(value, DTensor):
            continue
        if not isinstance(value, nn.Parameter):  # keep_vars=True asks for the parameter itself
            value = state_dict[prefix + attribute] = cut_like(without_offset(value), parameter)
        describe_like(value, parameter)


def _describe_state(optimizer: torch.optim.Optimizer, _state_dict: dict[str, Any]) -> None:
    """Post hook: the state dict holds the very tensors that the optimizer has."""
    for parameter, values in optimizer.state.items():
        for value in values.values():
            describe_like(cut_like(value, parameter), parameter)
