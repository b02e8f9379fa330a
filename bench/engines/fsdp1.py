"""Engine `fsdp1`: torch's FullyShardedDataParallel around each unit of a model and around the root.

Strategies, matched to what mfsdp communicates per step of k microbatches:
- no_shard: NO_SHARD, one all-reduce per unit, behind the last microbatch;
- optim_grads: SHARD_GRAD_OP, a gather and a reduce-scatter per unit and microbatch: weights are
  freed after every backward pass that reduces, so it gathers k times where fsdp2 gathers once;
- optim_grads_params: FULL_SHARD, two gathers and a reduce-scatter per unit and microbatch; the root
  keeps its weights from its forward to the end of its backward.
With an outer axis of replicas these are HYBRID_SHARD and its ZeRO-2 form, which reduce over both
axes on every microbatch. Parameters are stored in the main dtype; `MixedPrecision` gathers and
computes in the compute dtype and reduces in the gradient communication dtype.
"""

from __future__ import annotations

import inspect
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from bench.engines.dtypes import TORCH_DTYPES, main_dtype
from bench.engines.fsdp1_inspection import Fsdp1Inspection, flat_parameters
from bench.engines.optimizer import clip_shards
from bench.engines.ring_bytes import RingBytes
from bench.engines.stock import StockEngine, scaled_backward
from bench.errors import UnsupportedError
from bench.models.meshes import mesh_of
from bench.models.units import units
from bench.spec import SHARDED, ResolvedDtypes, ResolvedRun, StrategyName

_SHARDING: Final[dict[StrategyName, ShardingStrategy]] = {
    "no_shard": ShardingStrategy.NO_SHARD,
    "optim_grads": ShardingStrategy.SHARD_GRAD_OP,
    "optim_grads_params": ShardingStrategy.FULL_SHARD,
}
_HYBRID: Final[dict[StrategyName, ShardingStrategy]] = {
    "optim_grads": ShardingStrategy._HYBRID_SHARD_ZERO2,
    "optim_grads_params": ShardingStrategy.HYBRID_SHARD,
}


class Fsdp1Engine(StockEngine):
    """Weights, gradients and optimizer state on flat shards, one per unit."""

    def __init__(self, model: nn.Module, resolved: ResolvedRun, device: torch.device) -> None:
        self._sharded = SHARDED[resolved.strategy]
        self._fsdp = _wrapped(model.to(main_dtype(resolved.dtypes)), resolved, device)
        group = self._fsdp.process_group
        if resolved.engine.outer_size == 1 and group is not None:
            self._ring = RingBytes(group.size())
            self._count(self._ring, group)
        super().__init__(self._fsdp, resolved)

    def _count(self, ring: RingBytes, group: dist.ProcessGroup) -> None:
        """Reductions in a hook, which hybrid sharding does not take; gathers as they are called."""
        state = default_hooks.DefaultState(group)
        self._fsdp.register_comm_hook(state, partial(_counted_reduction, ring))
        for handle, _ in flat_parameters(self._fsdp):
            gather = handle._all_gather_flat_param
            handle._all_gather_flat_param = partial(_counted_gather, ring, gather)

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        """Shards are reduced on every microbatch, whole gradients on the last one."""
        waits = not self._sharded and not is_last
        with self._fsdp.no_sync() if waits else nullcontext():
            return scaled_backward(self._fsdp(tokens, targets), scale)

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        """FullyShardedDataParallel's own: the norm over all shards, in FP32."""
        if self.parameters[0].dtype == torch.float64:
            return self._clip_fp64(max_norm)
        with warnings.catch_warnings():
            # A rank whose shards end before the trainable parameters begin has no gradient.
            warnings.filterwarnings("ignore", message="Called FSDP.clip_grad_norm_")
            norm: Tensor = self._fsdp.clip_grad_norm_(max_norm)
        return norm

    def _clip_fp64(self, max_norm: float) -> Tensor:
        """As torch's own, which refuses FP64."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        own = self._fsdp.process_group
        groups = [own] if self._sharded and own is not None else []
        return clip_shards(gradients, max_norm, groups, self.parameters[0].device)

    def memory_by_category(self) -> dict[str, int]:
        """Flat shards as they are; gathered weights by the schedule.

        Gathered weights at most: everything for optim_grads; else the root and two units (the
        running and the prefetched one). Nothing is gathered for no_shard.
        """
        found = self.persistent_bytes()
        if not self._sharded:
            return found
        root, *rest = [_gathered_bytes(handle) for handle, _ in flat_parameters(self._fsdp)]
        rest.sort(reverse=True)
        resident = rest[:2] if "weights" in self._sharded else rest
        return found | {"compute_weights": root + sum(resident)}

    def inspection(self) -> Fsdp1Inspection:
        """For `mfsdp-bench validate`."""
        return Fsdp1Inspection(self._fsdp)

    def code_path(self) -> str:
        """The file of FullyShardedDataParallel."""
        return inspect.getfile(FullyShardedDataParallel)


def _wrapped(
    model: nn.Module, resolved: ResolvedRun, device: torch.device
) -> FullyShardedDataParallel:
    outer = resolved.engine.outer_size
    table = _HYBRID if outer > 1 else _SHARDING
    if resolved.strategy not in table:
        raise UnsupportedError(
            "fsdp1_strategy",
            f"fsdp1 offers {' and '.join(table)}"
            f"{' with an outer axis' if outer > 1 else ''}, not {resolved.strategy}",
        )
    mesh = mesh_of(device, dist.get_world_size(), outer=outer) if outer > 1 else None
    own = set(units(model))
    with warnings.catch_warnings():
        # NO_SHARD is deprecated in favour of ddp, and what one rank gets; here they are compared.
        warnings.filterwarnings("ignore", message=".*`NO_SHARD`")
        return FullyShardedDataParallel(
            model,
            sharding_strategy=table[resolved.strategy],
            auto_wrap_policy=CustomPolicy(lambda module: module in own),
            mixed_precision=_policy(resolved.dtypes),
            device_id=device,
            device_mesh=mesh,
            use_orig_params=True,
        )


def _policy(dtypes: ResolvedDtypes) -> MixedPrecision:
    # Inputs are not cast: activations already have the compute dtype, and the rotary tables, which
    # are inputs of a layer, must stay FP32.
    return MixedPrecision(
        param_dtype=TORCH_DTYPES[dtypes.compute],
        reduce_dtype=TORCH_DTYPES[dtypes.grad_comm],
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
    )


def _counted_reduction(ring: RingBytes, state: Any, grad: Tensor, *out: Tensor) -> None:
    """Torch's own hooks, counted: with an output it scatters, without one it reduces in place."""
    if out:
        ring.reduce_scatter(grad.nbytes)
        default_hooks.reduce_scatter_hook(state, grad, *out)
    else:
        ring.all_reduce(grad.nbytes)
        default_hooks.allreduce_hook(state, grad)


def _counted_gather(ring: RingBytes, gather: Any, whole: Tensor) -> Tensor:
    ring.gather(whole.nbytes, whole.dtype)
    found: Tensor = gather(whole)
    return found


def _gathered_bytes(handle: Any) -> int:
    whole, dtype = handle.flat_param._padded_unsharded_size, handle._fwd_bwd_param_dtype
    return int(whole.numel()) * int(dtype.itemsize)
