"""Tensors of `torch.func`: wrappers around wrappers, each with a graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

#: The function of `torch.func` that runs, None outside of all.
innermost: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
cleared = temporarily_clear_interpreter_stack
is_wrapper: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def outside_of_transforms(body: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`body`, whose tensors are plain ones also while a function of `torch.func` runs.

    Inside, even `torch.empty` makes a wrapper, which dies with the transform: a weight that is
    moved there is gone.
    """

    @wraps(body)
    def outside(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if innermost() is None:
            return body(*args, **kwargs)
        with cleared():
            return body(*args, **kwargs)

    return outside


def levels(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, then what it wraps, level by level; a plain one alone."""
    found = [tensor]
    while is_wrapper(found[-1]):
        found.append(torch._C._functorch.get_unwrapped(found[-1]))
    return found


def _tangents(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Directional derivatives beside them, which forward mode computes in graphs of their own."""
    found = [forward_ad.unpack_dual(tensor).tangent for tensor in tensors]
    return [tangent for tangent in found if tangent is not None]


def with_graphs(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of all levels of `tensors`, those through which a backward pass may come."""
    if forward_ad._current_level >= 0:
        tensors = [*tensors, *_tangents(tensors)]
    return [
        level
        for tensor in tensors
        for level in (levels(tensor) if is_wrapper(tensor) else (tensor,))
        if level.requires_grad and not level.is_leaf
    ]
