"""What each unit will ask the allocators for, from the planned buckets: the input of pool plans."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.plan.buffers import PooledRole, transient_buffers
from mfsdp_core.plan.grouping import ROOT
from mfsdp_core.plan.pools import BucketRequest
from mfsdp_core.runtime.bucket import BucketSpec


def pool_requests(specs: Iterable[BucketSpec]) -> dict[PooledRole, list[BucketRequest]]:
    """Requests of units by role, in the order of `specs`; the root is no unit."""
    requests: dict[PooledRole, list[BucketRequest]] = {}
    for spec in specs:
        if spec.plan.unit == ROOT:
            continue
        for wanted in transient_buffers(spec.plan, spec.strategy, spec.coordinate, spec.dtypes):
            requests.setdefault(wanted.role, []).append(
                BucketRequest(
                    unit=spec.plan.unit,
                    bucket=spec.name,
                    dtype=dtype_name(wanted.dtype),
                    elements=wanted.elements,
                    item_bytes=wanted.dtype.itemsize,
                    padding_elements=wanted.padding_elements,
                )
            )
    return requests


def pooled_dtypes(specs: Iterable[BucketSpec]) -> dict[str, torch.dtype]:
    """Torch dtype of every name that `pool_requests` uses."""
    found = {dtype for spec in specs for dtype in (spec.dtypes.compute, spec.dtypes.grad_comm)}
    return {dtype_name(dtype): dtype for dtype in found}
