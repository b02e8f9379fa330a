"""What each unit will ask the allocators for, from the planned buckets: the input of pool plans."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.memory.allocators import Role
from mfsdp_core.plan.grouping import ROOT
from mfsdp_core.plan.pools import BucketRequest
from mfsdp_core.runtime.bucket import BucketSpec
from mfsdp_core.runtime.grad_pipeline import IN_FLIGHT

#: Slots that a pool needs at most: one outer reduction is waited for before the next is started.
FEWER_SLOTS: dict[Role, int] = {"outer_bucket": IN_FLIGHT}


def pool_requests(specs: Iterable[BucketSpec]) -> dict[Role, list[BucketRequest]]:
    """Requests by role, in the order of `specs`.

    The root's buffers stay or are asked for once per pass, so no slot is planned for them.
    """
    requests: dict[Role, list[BucketRequest]] = {}
    for spec in specs:
        if spec.plan.unit != ROOT:
            for role, request in _of_bucket(spec):
                requests.setdefault(role, []).append(request)
    return requests


def pooled_dtypes(specs: Iterable[BucketSpec]) -> dict[str, torch.dtype]:
    """Torch dtype of every name that `pool_requests` uses."""
    found = {dtype for spec in specs for dtype in (spec.dtypes.compute, spec.dtypes.grad_comm)}
    return {dtype_name(dtype): dtype for dtype in found}


def _of_bucket(spec: BucketSpec) -> list[tuple[Role, BucketRequest]]:
    inner, dtypes = spec.strategy.inner, spec.dtypes
    whole = spec.layout.total_elements
    padding = whole - spec.layout.used_elements
    found: list[tuple[Role, BucketRequest]] = []
    if inner.gathers_every_use:
        found.append(("compute_weights", _request(spec, dtypes.compute, whole, padding)))
    if not spec.plan.requires_grad:
        return found
    if inner.reduces_every_microbatch or dtypes.needs_comm_buffer:
        found.append(("grad_bucket", _request(spec, dtypes.grad_comm, whole, padding)))
    if spec.coordinate.has_outer_axis and dtypes.needs_comm_buffer:
        accumulated = whole
        if inner.shards_optimizer:
            accumulated //= spec.coordinate.inner_size
        found.append(("outer_bucket", _request(spec, dtypes.grad_comm, accumulated, 0)))
    return found


def _request(
    spec: BucketSpec, dtype: torch.dtype, elements: int, padding_elements: int
) -> BucketRequest:
    return BucketRequest(
        unit=spec.plan.unit,
        bucket=spec.name,
        dtype=dtype_name(dtype),
        elements=elements,
        item_bytes=dtype.itemsize,
        padding_elements=padding_elements,
    )
