"""The public dtype policy, in torch's dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mfsdp_core.errors import ConfigurationError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of weights and gradients outside the forward and backward computation.

    main_params_dtype: weights that the optimizer updates; None makes the model's own weights the
    main ones. main_grads_dtype: accumulation of gradients; None is the parameter's dtype.
    grad_comm_dtype: the wire; None is the dtype of the main gradients. Where main and compute
    weights agree they are one copy.

    Raises:
        ConfigurationError: a value that is neither None nor a floating-point torch.dtype.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Check the types, which a caller without a type checker may get wrong."""
        for name, value in vars(self).items():
            if value is None or (isinstance(value, torch.dtype) and value.is_floating_point):
                continue
            raise ConfigurationError(
                f"MixedPrecisionPolicy({name}={value!r}): expected None or a floating-point "
                "torch.dtype such as torch.bfloat16."
            )
