"""Names of dtypes in a spec, as torch dtypes."""

from __future__ import annotations

from typing import Final

import torch

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
