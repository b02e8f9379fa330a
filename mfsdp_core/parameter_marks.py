"""What callers of upstream read on a sharded model's parameters and buffers.

Checkpoint converters, fused layers and optimizers of Megatron-LM and its kin find parameters by
these names. They describe; nothing in this package reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mfsdp_core.dist_index import FSDPDistributedIndex
from mfsdp_core.errors import CapabilityNotBuiltError
from mfsdp_core.runtime.parameter_group import ManagedParameter
from mfsdp_core.runtime.units import Unit
from mfsdp_core.shard.dtensor import local_tensor


def mark(managed: ManagedParameter, index: FSDPDistributedIndex) -> None:
    """Put upstream's attributes on both faces of a parameter.

    __fsdp_param__: on both; sharded by this package. orig_param: on the shard, the parameter that
    modules compute with, whose shape is that of the whole (of what tensor parallelism leaves to a
    rank). megatron_fsdp_slice: on the shard, its elements in `orig_param.flatten()`.
    megatron_fsdp_dist_index: on the shard, the model's `dist_index`.
    """
    sharded: Any = managed.sharded
    raw: Any = managed.raw
    sharded.__fsdp_param__ = raw.__fsdp_param__ = True
    sharded.orig_param = raw
    sharded.megatron_fsdp_dist_index = index
    sharded.megatron_fsdp_slice = _slice(managed)


def _slice(managed: ManagedParameter) -> slice:
    local = local_tensor(managed.sharded.data)
    shape = managed.part.shape
    row_elements = 1
    for size in shape[1:]:
        row_elements *= size
    first_row = managed.offsets[0] - (managed.part.offsets or (0,))[0] if managed.offsets else 0
    start = first_row * row_elements
    return slice(start, start + local.numel())


@dataclass(frozen=True)
class ParameterGroupFacts:
    """Parameters that share buffers.

    params: those that modules compute with. dtype: theirs. grad_dtype: of accumulated gradients.
    fsdp_unit_id: position of the unit in registration order, None for the root.
    """

    params: list[nn.Parameter]
    dtype: torch.dtype
    grad_dtype: torch.dtype | None
    is_expert_param: bool
    requires_grad: bool
    fsdp_unit_id: int | None


class ParamAndGradBuffer:
    """Upstream's handle on all buffers: what they hold, in the order of `MegatronFSDP.buckets`."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self.parameter_groups = [
            ParameterGroupFacts(
                [managed.raw for managed in group.parameters],
                group.dtypes.compute,
                group.dtypes.main_grads if group.is_trainable else None,
                group.plan.is_expert,
                group.is_trainable,
                unit.index,
            )
            for unit in units
            for group in unit.groups
        ]

    def manual_buffer_registration(self) -> None:
        """Refused: there are no user buffers in this version.

        Raises:
            CapabilityNotBuiltError: always.
        """
        raise CapabilityNotBuiltError(
            "manual_buffer_registration() needs NCCL user buffers (nccl_ub), which this version "
            "does not build. Remove the call."
        )
