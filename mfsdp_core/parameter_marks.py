"""What callers of upstream read on a sharded model's parameters and buffers.

Checkpoint converters, fused layers and optimizers of Megatron-LM and its kin find parameters by
these names. They describe; nothing in this package reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from mfsdp_core.comm.symmetric import UserBuffers
from mfsdp_core.dist_index import FSDPDistributedIndex
from mfsdp_core.errors import LifecycleError
from mfsdp_core.precision.transformer_engine import marks_of
from mfsdp_core.runtime.bucket import Bucket, ManagedParameter
from mfsdp_core.runtime.weight_buffers import Residency
from mfsdp_core.shard.dtensor import local_tensor


def mark(managed: ManagedParameter, index: FSDPDistributedIndex) -> None:
    """Put upstream's attributes on both faces of a parameter.

    __fsdp_param__: on both; sharded by this package. orig_param: on the shard, a stand-in for the
    parameter that modules compute with: its shape (of what tensor parallelism leaves to a rank),
    dtype and attributes, on the meta device, since there are values only while the unit runs.
    megatron_fsdp_slice: on the shard, its elements in the flattened whole.
    megatron_fsdp_dist_index: on the shard, the model's `dist_index`.
    """
    sharded: Any = managed.sharded
    raw: Any = managed.raw
    sharded.__fsdp_param__ = raw.__fsdp_param__ = True
    blank = torch.empty(managed.part.shape, dtype=raw.dtype, device="meta")
    sharded.orig_param = nn.Parameter(blank, requires_grad=raw.requires_grad)
    vars(sharded.orig_param).update(marks_of(raw))
    sharded.megatron_fsdp_dist_index = index
    sharded.megatron_fsdp_slice = _slice(managed)


def mark_for_kernels(managed: ManagedParameter, bucket: Bucket) -> None:
    """What fused layers read on a parameter, see [Note: fused weight gradients]."""
    raw: Any = managed.raw
    raw.get_main_grad = _no_main_gradient
    if bucket.gradients is not None:
        index = next(i for i, p in enumerate(bucket.parameters) if p is managed)
        raw.get_main_grad = partial(bucket.gradients.target, index, raw.device)
        raw.overwrite_main_grad = not bucket.gradients.holds_whole
        raw.grad_added_to_main_grad = False
        raw.zero_out_wgrad = len(managed.holders) > 1


def _slice(managed: ManagedParameter) -> slice:
    local = local_tensor(managed.sharded)
    shape = managed.part.shape
    row_elements = 1
    for size in shape[1:]:
        row_elements *= size
    first_row = managed.offsets[0] - (managed.part.offsets or (0,))[0] if managed.offsets else 0
    start = first_row * row_elements
    return slice(start, start + local.numel())


class RawParameters(Mapping[str, nn.Parameter]):
    """By name in the bare module, the parameters that modules compute with.

    Their values are there while their unit runs, and always where weights are not sharded.
    """

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._found = {p.names[0]: (p.raw, bucket) for bucket in buckets for p in bucket.parameters}

    def __getitem__(self, name: str) -> nn.Parameter:
        """Raises LifecycleError where reading the parameter would read memory that is gone."""
        raw, bucket = self._found[name]
        if bucket.weights.state is not Residency.READY:
            raise LifecycleError(
                f"{name} is not gathered: its values are there only while its unit runs. Use "
                "gather_full(parameter) for the main weight, or read it in a forward hook."
            )
        return raw

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class ParameterNames(Mapping[torch.Tensor, str]):
    """The name in the bare module of every shard, and of the parameter it stands for.

    Iteration gives the shards; the others are there for whoever meets one while a unit runs.
    """

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        managed = [p for bucket in buckets for p in bucket.parameters]
        self._shards = [p.sharded for p in managed]
        self._names = {id(face): p.names[0] for p in managed for face in (p.raw, p.sharded)}

    def __getitem__(self, parameter: torch.Tensor) -> str:
        return self._names[id(parameter)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


class ParamAndGradBuffer:
    """Upstream's handle on all buffers, as far as callers register them."""

    def __init__(self, user_buffers: UserBuffers | None = None) -> None:
        self._user_buffers = user_buffers

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
        if self._user_buffers is not None:
            self._user_buffers.close()


def _no_main_gradient() -> torch.Tensor:
    """`get_main_grad()` of a frozen parameter.

    Raises:
        LifecycleError: always.
    """
    raise LifecycleError("get_main_grad() of a frozen parameter: it has no gradient.")
