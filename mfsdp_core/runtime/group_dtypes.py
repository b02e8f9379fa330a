"""Dtypes of a bucket under a policy, and whether its gradients can be added up so."""

from __future__ import annotations

from dataclasses import replace

import torch

from mfsdp_core.errors import ConfigurationError
from mfsdp_core.plan.dtype_policy import GroupDtypes, is_wider, resolve_dtypes
from mfsdp_core.plan.options import Options
from mfsdp_core.precision.policy import MixedPrecisionPolicy


def group_dtypes(
    compute: torch.dtype,
    policy: MixedPrecisionPolicy,
    options: Options,
    *,
    trainable: bool,
) -> GroupDtypes[torch.dtype]:
    """Dtypes of a bucket under `policy`.

    Raises:
        ConfigurationError: a policy of real dtypes for complex parameters, or a `reduce_dtype` that
            gradients cannot be added up in.
    """
    dtypes = resolve_dtypes(
        compute,
        policy.main_params_dtype,
        policy.main_grads_dtype,
        policy.grad_comm_dtype,
        policy.reduce_dtype,
        trainable=trainable,
    )
    if policy.reduce_dtype is None and options.by_collectives:
        dtypes = replace(dtypes, reduce=dtypes.grad_comm)
    wanted = (dtypes.main_params, dtypes.main_grads, dtypes.grad_comm)
    if compute.is_complex and not all(dtype.is_complex for dtype in wanted):
        raise ConfigurationError(
            f"complex parameters ({compute}) would lose their imaginary part under {policy}. Pass "
            "MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=None, "
            "grad_comm_dtype=None), which leaves dtypes alone, or hold them as real ones with "
            "torch.view_as_real."
        )
    _check_sums(dtypes, options)
    return dtypes


def _check_sums(dtypes: GroupDtypes[torch.dtype], options: Options) -> None:
    """See [Note: one rounding] of `plan.options`."""
    wire, total = dtypes.grad_comm, dtypes.reduce
    if total == wire or (options.exchanges and is_wider(total, wire)):
        return
    found = f"gradients that travel in {wire} were to be added up in {total}"
    keep = f"MixedPrecisionPolicy(reduce_dtype={wire})"
    if not is_wider(total, wire):
        raise ConfigurationError(f"{found}, which holds less. Pass {keep}, or a wider one.")
    registers = options.by_collectives
    by = "nccl_ub and cuda_graph_mode use" if registers else "transport='native' uses"
    other = "leave them out" if registers else "transport='auto'"
    raise ConfigurationError(
        f"{found}, and {by} the backend's collectives, which add up in the dtype of the wire. Pass "
        f"{keep} for that, grad_comm_dtype={total} to send more bytes, or {other}: ranks then add "
        "up what they exchange, on any backend."
    )
