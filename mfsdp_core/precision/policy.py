"""The public dtype policy, in torch's dtypes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mfsdp_core.errors import refuse_configuration
from mfsdp_core.precision.codec import Codec


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of weights and gradients outside the forward and backward computation.

    main_params_dtype: weights that the optimizer updates; None makes the model's own weights the
    main ones. main_grads_dtype: accumulation of gradients; None is the parameter's dtype.
    grad_comm_dtype: the wire; None is the dtype of the main gradients. Where main and compute
    weights agree they are one copy. weight_codec: encodes the parameters that it takes on their
    way to the ranks that compute with them (`mfsdp_core.precision.codec`); None sends weights as
    they are. reduce_dtype: in which ranks' gradients are added up, the same on every backend (see
    [Note: one rounding] of `plan.options`); None is the dtype of the main gradients, or of the wire
    where that holds more.

    Raises:
        ConfigurationError: a value that is neither None nor a floating-point torch.dtype, or a
            codec without the methods of one.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    weight_codec: Codec | None = field(default=None, kw_only=True)
    reduce_dtype: torch.dtype | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check the types, which a caller without a type checker may get wrong."""
        for name in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype", "reduce_dtype"):
            value = getattr(self, name)
            is_real = isinstance(value, torch.dtype) and value.is_floating_point
            what = f"MixedPrecisionPolicy({name}={value!r}): expected None or a floating-point "
            what += "torch.dtype such as torch.bfloat16."
            refuse_configuration([(value is not None and not is_real, what)])
        codec, methods = self.weight_codec, ("takes", "payloads", "for_bucket")
        missing = [name for name in methods if not hasattr(codec, name)]
        what = (
            f"weight_codec={codec!r}: expected None or a codec (mfsdp_core.precision.codec.Codec)"
        )
        wrong = codec is not None and missing
        refuse_configuration([(wrong, f"{what}, found no {', '.join(missing)}.")])
