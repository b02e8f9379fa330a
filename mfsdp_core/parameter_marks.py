"""What callers of upstream read on a sharded model's parameters.

Checkpoint converters, fused layers and optimizers of Megatron-LM and its kin find parameters by
these names. They describe; nothing in this package reads them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from mfsdp_core.errors import LifecycleError
from mfsdp_core.precision.transformer_engine import marks_of
from mfsdp_core.runtime.bucket import Bucket, ManagedParameter
from mfsdp_core.shard.dtensor import local_tensor
from mfsdp_core.upstream_view import DistIndex


def mark(managed: ManagedParameter, index: DistIndex) -> None:
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


def _no_main_gradient() -> torch.Tensor:
    """`get_main_grad()` of a frozen parameter.

    Raises:
        LifecycleError: always.
    """
    raise LifecycleError("get_main_grad() of a frozen parameter: it has no gradient.")
