"""The shard of a weight as the user sees it: a DTensor that tells whether it was changed.

[Note: changed weights] Between passes the weights belong to the user, who may change them in place,
and the compute weights of all ranks must follow. Autograd counts changes of the DTensor and of its
local tensor, on every rank alike, whatever the values are; and, since `.data` is the same as
`.detach()` here, those that go through it. What updates a list of DTensors at once
(`torch._foreach_mul_`, fused optimizers) is counted by `UnevenShard`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import LifecycleError
from mfsdp_core.shard.chunk import offsets_of, remember_offsets
from mfsdp_core.shard.dtensor import local_tensor
from mfsdp_core.shard.uneven_shard import UnevenShard, shard_like

#: Where torch keeps it.
_GRADIENT: Any = torch.Tensor.grad


def accessors(
    attribute: str,
) -> tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor, Any], None]]:
    """Functions that get and set a gradient under that name, past `ShardedWeight.grad`."""
    if attribute == "grad":
        return _GRADIENT.__get__, _GRADIENT.__set__
    return lambda p: getattr(p, attribute, None), lambda p, value: setattr(p, attribute, value)


class ShardedWeight(UnevenShard):
    """See [Note: changed weights]. What is computed from it counts no changes."""

    _local_tensor: torch.Tensor
    #: Gives the weight its gradient, if it has one: see [Note: unused parameters] of `comm/usage`.
    unread: Callable[[], None] | None = None

    def __new__(cls, *_arguments: Any, **_options: Any) -> ShardedWeight:
        """Refuse: `sharded_weight` makes them.

        Raises:
            LifecycleError: always.
        """
        raise LifecycleError(
            "a sharded parameter cannot be made anew on another device, as accelerate's "
            "cpu_offload does it: its rows are part of a buffer. Weights are not offloaded to the "
            "CPU; choose the device by the device argument of fully_shard_model."
        )

    @property
    def grad(self) -> torch.Tensor | None:
        """The reduced gradient, which is read first where nobody has done so."""
        if self.unread is not None:
            self.unread()
        found: torch.Tensor | None = _GRADIENT.__get__(self)
        return found

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        """Another one, or None."""
        self.unread = None
        _GRADIENT.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        """As None."""
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        """The same shard without autograd; changing it in place counts."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take the values of a shard of the same kind; the memory stays that of the buffers.

        Raises:
            LifecycleError: a whole tensor, or one of another shape, dtype, device or placement.
        """
        fits = (
            isinstance(value, DTensor)
            and (value.shape, value.dtype, value.device) == (self.shape, self.dtype, self.device)
            and value.placements == self.placements
            and value._local_tensor.shape == self._local_tensor.shape
        )
        if not fits:
            raise LifecycleError(
                f".data of a sharded parameter was assigned {described(value)}; expected "
                f"{described(self)}, whose values are copied. For whole tensors use "
                "load_state_dict(); cast or move a module before it is sharded."
            )
        with torch.no_grad():
            self._local_tensor.copy_(cast(DTensor, value)._local_tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A parameter of its own: the same shard over new memory, unknown to any model."""
        local: torch.Tensor = local_tensor(self).clone(memory_format=torch.preserve_format)
        copied = nn.Parameter(shard_like(local, self), requires_grad=self.requires_grad)
        if (offsets := offsets_of(self)) is not None:
            remember_offsets(copied, offsets)
        memo[id(self)] = copied
        return copied


def sharded_weight(shard: DTensor, *, requires_grad: bool) -> nn.Parameter:
    """The parameter of `shard`."""
    parameter: Any = shard.requires_grad_(requires_grad)
    parameter._is_param = True  # as nn.Parameter does, which would detach the shard first
    # Counts changes by itself: what the core writes into its buffers is no change of the user's.
    parameter._local_tensor = parameter._local_tensor.data
    parameter.__class__ = ShardedWeight
    made: nn.Parameter = parameter
    return made


def described(value: torch.Tensor) -> str:
    """What a tensor is, for messages."""
    is_shard = isinstance(value, DTensor)
    cut = f", placed {cast(DTensor, value).placements}" if is_shard else ""
    kind = "a DTensor" if is_shard else "a whole tensor"
    return f"{kind} of shape {tuple(value.shape)}, {value.dtype} on {value.device}{cut}"
