"""What callers of upstream read on a sharded model, and on its parameters.

Checkpoint converters, fused layers and optimizers of Megatron-LM and its kin find parameters by
these names, and its tests read `model.dist_index` and `model.param_and_grad_buffer`. They describe;
nothing in this package reads them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from mfsdp_core.comm.symmetric import UserBuffers
from mfsdp_core.errors import LifecycleError
from mfsdp_core.precision.transformer_engine import marks_of
from mfsdp_core.runtime.bucket import Bucket
from mfsdp_core.runtime.parameters import ManagedParameter
from mfsdp_core.shard.dtensor import local_tensor


class DistIndex(NamedTuple):
    """fsdp_group: the ranks that shard a parameter along the inner axis."""

    fsdp_group: dist.ProcessGroup

    def get_fsdp_group(self) -> dist.ProcessGroup:
        """`fsdp_group`."""
        return self.fsdp_group


class BufferView(NamedTuple):
    """data: this rank's memory, of no elements where there is none now; its dtype is right."""

    data: torch.Tensor


class ParameterGroup(NamedTuple):
    """One bucket. A buffer is None where weights have no second copy, or no gradients."""

    bucket: Bucket

    @property
    def main_weight_buffer(self) -> BufferView | None:
        """What the optimizer updates, if modules compute with a copy in another dtype."""
        bucket = self.bucket
        return None if bucket.dtypes.shares_weights else BufferView(bucket.weights.main)

    @property
    def main_grad_buffer(self) -> BufferView | None:
        """What gradients are reduced into, from the first of a cycle on."""
        gradients = self.bucket.gradients
        if gradients is None:
            return None
        empty = torch.empty(0, dtype=self.bucket.dtypes.main_grads)
        return BufferView(empty if gradients.reduced is None else gradients.reduced)


class ParamAndGradBuffer:
    """parameter_groups: one for each bucket, the root's first."""

    def __init__(self, buckets: Sequence[Bucket], user_buffers: UserBuffers | None) -> None:
        self.parameter_groups = [ParameterGroup(bucket) for bucket in buckets]
        self._user_buffers = user_buffers
        #: Of captured steps, whose graphs have the addresses of registered memory.
        self.before_close: list[weakref.WeakMethod[Callable[[], None]]] = []

    def manual_buffer_registration(self) -> None:
        """Register communication buffers with NCCL, once, after the first iteration. Collective.

        Raises:
            LifecycleError: there are none, or they are registered already.
        """
        if self._user_buffers is None:
            raise LifecycleError(
                "manual_buffer_registration() registers NCCL user buffers, and this model has none."
                " Shard it with nccl_ub=True and manual_registration=True, or remove the call."
            )
        self._user_buffers.register()

    def close(self) -> None:
        """Deregister what is registered with NCCL. Before `destroy_process_group`."""
        for reference in self.before_close:
            if (forget := reference()) is not None:
                forget()
        if self._user_buffers is not None:
            self._user_buffers.close()


def mark(managed: ManagedParameter, bucket: Bucket, index: DistIndex) -> None:
    """Put upstream's attributes on both faces of a parameter.

    __fsdp_param__: on both; sharded by this package. orig_param: on the shard, a stand-in for the
    parameter that modules compute with: its shape (of what tensor parallelism leaves to a rank),
    dtype and attributes, on the meta device, since there are values only while the unit runs.
    megatron_fsdp_slice: on the shard, its elements in the flattened whole.
    megatron_fsdp_dist_index: on the shard, the model's `dist_index`. The others are read by fused
    layers: see [Note: fused weight gradients].
    """
    sharded: Any = managed.sharded
    raw: Any = managed.raw
    sharded.__fsdp_param__ = raw.__fsdp_param__ = True
    blank = torch.empty(managed.part.shape, dtype=raw.dtype, device="meta")
    sharded.orig_param = nn.Parameter(blank, requires_grad=raw.requires_grad)
    vars(sharded.orig_param).update(marks_of(raw))
    sharded.megatron_fsdp_dist_index = index
    first_row = managed.offsets[0] - (managed.part.offsets or (0,))[0] if managed.offsets else 0
    start = first_row * prod(managed.part.shape[1:])
    sharded.megatron_fsdp_slice = slice(start, start + local_tensor(sharded).numel())
    raw.get_main_grad = _no_main_gradient
    if bucket.gradients is not None:
        number = next(i for i, p in enumerate(bucket.parameters) if p is managed)
        raw.get_main_grad = partial(bucket.gradients.target, number, raw.device)
        raw.overwrite_main_grad = not bucket.gradients.holds_whole
        raw.grad_added_to_main_grad = False
        raw.zero_out_wgrad = len(managed.holders) > 1


def _no_main_gradient() -> torch.Tensor:
    """`get_main_grad()` of a frozen parameter.

    Raises:
        LifecycleError: always.
    """
    raise LifecycleError("get_main_grad() of a frozen parameter: it has no gradient.")
