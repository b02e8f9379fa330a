"""Moments that an optimizer keeps as codes: torchao's Adam and AdamW in 8 bits, FP8 and 4 bits.

Codes that lie side by side share a scale, and all of them lie in a rank's own rows. So such an
optimizer steps on local tensors, as under torch's `fully_shard`. A parameter of less than 4096
elements on a rank, or of no whole number of blocks, keeps plain moments there, which is torchao's
rule. `state_dict()` and checkpoints hold decoded values, which any number of ranks can read, and
loading makes codes again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mfsdp_core.shard.dtensor import local_tensor
from mfsdp_core.shard.uneven_shard import shard_like
from mfsdp_core.state.owner import numbered

_MODULE = "torchao.optim.adam"
#: The first moment has a sign.
_SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}


def keeps_codes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is one of torchao's. Never imports it."""
    return any(kind.__module__ == _MODULE for kind in type(optimizer).__mro__)


def held_bytes(tensor: torch.Tensor) -> int:
    """Bytes that this rank holds of a tensor, of codes with their scales and tables."""
    local: torch.Tensor = local_tensor(tensor)
    if type(local) in (torch.Tensor, torch.nn.Parameter) or not hasattr(
        local, "__tensor_flatten__"
    ):
        return local.numel() * local.element_size()
    names, _ = local.__tensor_flatten__()
    return sum(held_bytes(getattr(local, name)) for name in names)


def decoded(value: Any, parameter: torch.Tensor) -> Any:
    """The values that codes stand for, placed as the parameter is; anything else as it is."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if not isinstance(local, torch.Tensor) or not hasattr(local, "dequantize"):
        return value
    if type(local) is torch.Tensor:  # every tensor has a method of that name
        return value
    plain: torch.Tensor = local.dequantize()
    return shard_like(plain, parameter) if isinstance(parameter, DTensor) else plain


def encoded(optimizer: Any, key: str, value: Any, parameter: torch.Tensor) -> Any:
    """`value` as `optimizer` keeps entry `key` of a parameter's state: as codes, if it does."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if key not in _SIGNED or type(local) is not torch.Tensor or not keeps_codes(optimizer):
        return value
    made: torch.Tensor = optimizer._new_buffer(local_tensor(parameter).detach(), _SIGNED[key])
    made.copy_(local)
    return shard_like(made, parameter) if isinstance(parameter, DTensor) else made


def exchange_decoded(optimizer: torch.optim.Optimizer) -> None:
    """Let the state dicts of `optimizer` hold plain values, if it keeps codes."""
    if keeps_codes(optimizer):
        optimizer.register_state_dict_post_hook(_decode)
        optimizer.register_load_state_dict_pre_hook(_encode)


def _decode(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for number, parameter in numbered(optimizer, state_dict):
        if number in state_dict["state"]:
            state_dict["state"][number] = {
                key: decoded(value, parameter) for key, value in state_dict["state"][number].items()
            }


def _encode(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = dict(state_dict["state"])
    for number, parameter in numbered(optimizer, state_dict):
        if number in state:
            state[number] = {
                key: encoded(optimizer, key, value, parameter)
                for key, value in state[number].items()
            }
    return {**state_dict, "state": state}
