"""What Megatron-LM and its tests read of `model.dist_index` and `model.param_and_grad_buffer`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from mfsdp_core.comm.symmetric import UserBuffers
from mfsdp_core.errors import LifecycleError
from mfsdp_core.runtime.bucket import Bucket


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
