"""Tensors that bring hooks of their own for their gather, as torch's `fully_shard` calls them.

    fsdp_pre_all_gather(mesh)                                    what travels, and metadata
    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)      the same, newer
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)
        out=None: returns the tensor that modules compute with, and the tensors inside it
        out=that tensor: the same memory has been filled again, and only the rest is updated

Weights of torchao's float8, int8 mixed precision, BitNet and MXFP8 layers are such tensors: a
wrapper around one plain tensor of the same shape, which holds the values.
"""

from __future__ import annotations

from typing import Any

import torch

from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def has_gather_hooks(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is of a kind that wants to be gathered by its own hooks.

    Raises:
        ConfigurationError: it has one of the two hooks alone.
    """
    found = [hasattr(tensor, name) for name in (PRE, POST)]
    if any(found) and not all(found):
        present, missing = (PRE, POST) if found[0] else (POST, PRE)
        raise ConfigurationError(
            f"a {type(tensor).__name__} has {present} and no {missing}: expected both or neither."
        )
    return all(found)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside one with gather hooks, sharing memory; others as they are."""
    if type(tensor) is torch.Tensor or not hasattr(tensor, PRE):
        return tensor
    values: torch.Tensor = getattr(tensor, _inner_name(tensor))
    return values.detach()


def with_values(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A tensor of the kind of `like` around `values`, perhaps of another shape and dtype."""
    kind: Any = type(like)
    names, context = like.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(like, name) for name in names} | {_inner_name(like): values}
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, values.shape, values.stride())
    return made


def options_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Attributes beside the values, such as a scale that was computed ahead."""
    inner = _inner_name(tensor)
    return {name: value for name, value in vars(tensor).items() if name != inner}


def check_hooked(name: str, tensor: torch.Tensor) -> None:
    """Refuse what wraps no plain values, or has hooks for gradients.

    Raises:
        CapabilityNotBuiltError: the values are no single plain tensor of the same shape.
        ConfigurationError: the parameter has hooks, which the gathered one would not have.
    """
    if _find_inner(tensor) is None:
        raise CapabilityNotBuiltError(
            f"{name} is a {type(tensor).__name__}, which keeps its values in other than one tensor "
            "of its shape and dtype (quantised weights without full ones behind them, as int8 or "
            "nf4). Such weights are not sharded here: use fully_shard, or plain weights."
        )
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise ConfigurationError(
            f"{name}, a {type(tensor).__name__}, has hooks for its gradient. Modules will compute "
            "with another object that lacks them: register them on the sharded parameter."
        )


def _inner_name(tensor: torch.Tensor) -> str:
    name = _find_inner(tensor)
    assert name is not None, f"{type(tensor).__name__} was checked when it was sharded"
    return name


def _find_inner(tensor: torch.Tensor) -> str | None:
    """The attribute that holds the values; None unless it is one."""
    if not hasattr(tensor, "__tensor_flatten__") or not hasattr(tensor, "__tensor_unflatten__"):
        return None
    names, _ = tensor.__tensor_flatten__()
    sizes = {name: getattr(tensor, name) for name in names}
    found = [n for n, t in sizes.items() if (t.shape, t.dtype) == (tensor.shape, tensor.dtype)]
    rest = [t for n, t in sizes.items() if n not in found and t.numel() > 1]
    return found[0] if len(found) == 1 and not rest else None
