"""Fills in the dtypes that a spec leaves open, by the rules of the core's own policy."""

from __future__ import annotations

from bench.spec import DtypeSpec, ResolvedDtypes
from mfsdp_core.plan.dtype_policy import resolve_dtypes as resolve_group_dtypes


def resolve_dtypes(dtypes: DtypeSpec) -> ResolvedDtypes:
    """The four dtypes of a run.

    main_grads defaults to the compute dtype, grad_comm to main_grads. `main_params` None is kept:
    it says that the compute weights are the main ones, whatever their dtype.
    """
    group = resolve_group_dtypes(
        dtypes.compute, dtypes.main_params, dtypes.main_grads, dtypes.grad_comm
    )
    return ResolvedDtypes(
        compute=group.compute,
        main_params=dtypes.main_params,
        main_grads=group.main_grads,
        grad_comm=group.grad_comm,
    )
