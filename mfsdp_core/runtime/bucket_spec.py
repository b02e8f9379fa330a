"""What the weights, the gradients and the parameters of one bucket all need to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.errors import ConfigurationError
from mfsdp_core.plan.buffers import BucketBuffers, plan_buffers
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.dtype_policy import GroupDtypes, is_wider, resolve_dtypes
from mfsdp_core.plan.grouping import BucketPlan
from mfsdp_core.plan.layout import Layout, Rows, Shape
from mfsdp_core.plan.options import Options
from mfsdp_core.plan.payload import Payload
from mfsdp_core.plan.strategy import Strategy
from mfsdp_core.precision.codec import BucketCodec, Shard
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


@dataclass(frozen=True)
class BucketSpec:
    """A planned bucket, its placements along both axes, this rank's coordinate, and its dtypes.

    dense_ranks: number of ranks that gradients are divided by, see [Note: divisor]. payloads: what
    gathers send, in their order, as far as is known before. codec: makes that of its weights.
    """

    plan: BucketPlan
    options: Options
    coordinate: Coordinate
    dtypes: GroupDtypes[torch.dtype]
    dense_ranks: int
    payloads: tuple[Payload, ...]
    codec: Callable[[Shard], BucketCodec]

    @cached_property
    def buffers(self) -> BucketBuffers:
        """The bucket's rows of the one table of memory."""
        return plan_buffers(
            self.plan,
            self.strategy,
            self.coordinate,
            GroupDtypes(*map(dtype_name, vars(self.dtypes).values())),
            self.payloads,
            decoupled=self.options.use_decoupled_grad,
            pooled=self.options.allocation.pool is not None,
            offload=self.options.offload,
        )

    @cached_property
    def strategy(self) -> Strategy:
        """Its placements along both axes."""
        return self.options.strategy

    @property
    def name(self) -> str:
        """Name in events and messages."""
        return self.plan.name

    @property
    def layout(self) -> Layout:
        """Where each parameter lies."""
        return self.plan.layout

    @cached_property
    def own_rows(self) -> list[Rows]:
        """What this rank's main weights have of each tensor; all slices where they are whole."""
        return [self.layout.rows_in(i, self.buffers.owned) for i in range(len(self.layout.slots))]

    @cached_property
    def _own_parts(self) -> list[tuple[Shape, Shape, int]]:
        """Shape, strides and first element of each tensor's part of the main weights."""
        slots = self.layout.slots
        if not self.strategy.inner.shards_optimizer:
            return [(slot.shape, slot.strides, slot.offset) for slot in slots]
        return [
            ((own.rows, *slot.shape[1:]), slot.strides or (1,), own.start)
            for slot, own in zip(slots, self.own_rows, strict=True)
        ]

    def local_view(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """A parameter's part of `flat`: a slice's whole rows, perhaps none, or the whole tensor.

        `flat` has the extent of the main weights: one slice where the optimizer is sharded, else
        the full buffer.
        """
        shape, strides, start = self._own_parts[index]
        # One operation of torch where a slice and its shape are two.
        return flat.as_strided(shape, strides, flat.storage_offset() + start)
