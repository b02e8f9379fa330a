"""Whether ranks begin with equal weights, which is their caller's business and easy to forget.

A sharded weight takes each row from the rank that owns it, so unequal weights become a mixture that
no rank had; whole ones stay unequal. One reduction of two integers per parameter finds out.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from mfsdp_core.comm.data_parallel import DataParallelAxes
from mfsdp_core.comm.uneven import largest_over_ranks
from mfsdp_core.runtime.parameters import ManagedParameter
from mfsdp_core.shard.dtensor import local_tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def warn_of_unequal(parameters: Iterable[ManagedParameter], axes: DataParallelAxes) -> None:
    """Warn on every rank if some parameter has other values on another one. Collective.

    Parameters on the meta device, expanded ones, and those that are no plain tensors are not looked
    at.
    """
    looked_at = [p for p in parameters if type(local_tensor(p.raw).data) is torch.Tensor]
    looked_at = [
        p for p in looked_at if not p.raw.is_meta and 0 not in local_tensor(p.raw).stride()
    ]
    if not looked_at:
        return
    sums = torch.tensor([_sum_of_bits(local_tensor(p.raw).data) for p in looked_at])
    both = torch.cat([sums, -sums]).to(looked_at[0].raw.device)
    for axis in range(axes.mesh.ndim):
        both = largest_over_ranks(both, axes.mesh.get_group(axis))
    largest, smallest = both.view(2, -1)
    unequal = torch.nonzero(largest != -smallest).flatten().tolist()
    if unequal:
        warnings.warn(
            f"{len(unequal)} of {len(looked_at)} parameters have other values on other ranks (the "
            f"first is {looked_at[unequal[0]].names[0]}). Training would begin with a mixture, "
            "unless a checkpoint is loaded now: seed all ranks alike before the model is built. "
            "broadcast_params() mends it where ranks hold whole weights (no_shard).",
            UserWarning,
            stacklevel=5,
        )


def _sum_of_bits(values: torch.Tensor) -> int:
    """Of the elements' bits as integers: equal for equal tensors."""
    if values.is_complex():
        values = torch.view_as_real(values)
    return int(values.contiguous().view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64))
