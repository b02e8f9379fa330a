"""Hooks that users register on sharded parameters: run on the reduced gradient, when it is there.

[Note: hooks of parameters] Autograd knows the raw parameters, so it never calls a hook that was
registered on a sharded one. Its gradient is the shard of the mean over all ranks, complete at the
end of a cycle: that is what a hook of one process over the whole batch would see, if the cycle is
one backward pass. `register_hook` is meant for the gradient of every single pass; where several
have been summed up it is refused. `register_post_accumulate_grad_hook` is meant for the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import LifecycleError
from mfsdp_core.shard.dtensor import local_tensor


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether the user has registered any."""
    hooked: Any = parameter
    return bool(hooked._backward_hooks or hooked._post_accumulate_grad_hooks)


def run_hooks(parameter: nn.Parameter, gradient: DTensor, name: str, *, once: bool) -> None:
    """Run them on `gradient`, which is attached already; its values take those of the results.

    once: it holds one backward pass, and nobody has seen it yet.

    Raises:
        LifecycleError: a hook for single passes where several have been summed up, or one that
            returned something else than a gradient of the same shards.
    """
    hooked: Any = parameter
    hooks = tuple((hooked._backward_hooks or {}).values())
    if hooks and not once:
        raise LifecycleError(
            f"register_hook on {name} is for the gradient of one backward pass, and this cycle has "
            "summed up several. Use register_post_accumulate_grad_hook, which gets the parameter "
            "with the sum in .grad, or call zero_grad() after every backward pass."
        )
    for hook in hooks:
        result = hook(gradient)
        if result is None or result is gradient:
            continue
        fits = isinstance(result, DTensor) and result.placements == gradient.placements
        if not fits or result.shape != gradient.shape:
            raise LifecycleError(
                f"a hook on {name} returned a {type(result).__name__}; expected None or a DTensor "
                f"of shape {tuple(gradient.shape)}, placed {gradient.placements} as its argument. "
                "Compute it from the argument."
            )
        local_tensor(gradient).copy_(local_tensor(result))
    with torch.no_grad():
        for hook in tuple((hooked._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)
