"""Names of dtypes in a spec, as torch dtypes; and a rank's own part of a tensor."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bench.spec import DtypeName, ResolvedDtypes

TORCH_DTYPES: Final[dict[DtypeName, torch.dtype]] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def main_dtype(dtypes: ResolvedDtypes) -> torch.dtype:
    """Dtype of the weights that the optimizer updates: `main_params`, or else the compute dtype."""
    return TORCH_DTYPES[dtypes.main_params or dtypes.compute]


def local_tensor(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor (possibly empty), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
