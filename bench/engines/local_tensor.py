"""This rank's part of a tensor: memory is counted where it lies."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor (possibly empty), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
