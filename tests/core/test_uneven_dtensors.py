"""DTensors that were cut anywhere, also on two axes: put together, and split as torch would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from conformance.judging import same
from mfsdp_core.errors import LayoutError
from mfsdp_core.uneven_dtensor import split_dtensor, uneven_dtensor_to_full_tensor
from oracle.ranks import two_axes

pytestmark = pytest.mark.on_ranks

#: Shape; the dimension that each axis cuts, and the lengths of its parts.
CUT: dict[str, tuple[tuple[int, ...], tuple[tuple[int, tuple[int, int]], ...]]] = {
    "two dimensions": ((16, 24), ((0, (8, 8)), (1, (12, 12)))),
    "two dimensions, unevenly": ((13, 15), ((0, (7, 6)), (1, (8, 7)))),
    "parts without rows": ((4, 5), ((0, (0, 4)), (1, (5, 0)))),
    "the first and the last of three": ((4, 3, 5), ((0, (1, 3)), (2, (4, 1)))),
}
PLACED: dict[str, tuple[Any, ...]] = {
    "a replica": (Shard(0), Replicate()),
    "replicas of parts": (Replicate(), Shard(1)),
}


def by_hand(name: str, dtype: torch.dtype) -> tuple[Tensor, DTensor]:
    shape, axes = CUT[name]
    mesh, _ = two_axes()
    whole = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    part = whole
    for axis, (dim, lengths) in enumerate(axes):
        index = mesh.get_local_rank(axis)
        part = part.narrow(dim, sum(lengths[:index]), lengths[index])
    placements = tuple(Shard(dim) for dim, _ in axes)
    made = DTensor.from_local(
        part.contiguous(), mesh, placements, shape=whole.shape, stride=whole.stride()
    )
    return whole, made


def placed(name: str, dtype: torch.dtype) -> tuple[Tensor, DTensor]:
    whole = torch.arange(8 * 6).view(8, 6).to(dtype)
    return whole, distribute_tensor(whole, two_axes()[0], PLACED[name])


@pytest.mark.parametrize(
    ("name", "dtype"),
    list(zip([*CUT, *PLACED], 2 * [torch.float64, torch.bfloat16, torch.int64], strict=True)),
)
def test_wholes_and_parts_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    whole, dtensor = (by_hand if name in CUT else placed)(name, dtype)
    same("whole", uneven_dtensor_to_full_tensor(dtensor), whole)
    for dim in range(whole.ndim):
        for sections in (2, [1, whole.shape[dim] - 1]):
            parts = split_dtensor(dtensor, sections, dim, True)
            found = [uneven_dtensor_to_full_tensor(part) for part in parts]
            same(f"split {sections} of dim {dim}", found, whole.split(sections, dim))


def split_into_four(tensor: DTensor) -> list[DTensor]:
    return list(split_dtensor(tensor, 4))


@pytest.mark.parametrize("call", [uneven_dtensor_to_full_tensor, split_into_four])
def test_rows_that_do_not_lie_together_are_refused(call: Any) -> None:
    """Rows 0 and 2 of a half on one rank, 1 and 3 on the other: no order of parts is the whole."""
    placements = (Shard(0), _StridedShard(0, split_factor=2))
    dtensor = distribute_tensor(torch.ones(8, 6), two_axes()[0], placements)
    with pytest.raises(LayoutError, match="rows that do not lie together"):
        call(dtensor)
