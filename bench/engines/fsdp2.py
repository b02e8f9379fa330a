"""Engine `fsdp2`: torch.distributed.fsdp.fully_shard on each unit of the model and on the root.

Strategies, matched to what mfsdp communicates per step of k microbatches:
- optim_grads: `reshard_after_forward=False`, and weights stay gathered until the last backward: one
  gather and k reduce-scatters per unit;
- optim_grads_params: `reshard_after_forward=True` for the layers: two gathers and one
  reduce-scatter per layer and microbatch. The root keeps its weights from its forward to the end
  of its backward, as fully_shard's own default has it. With the setting `reshard_after_forward` a
  layer keeps its part of a group of so many ranks in between, and its second gather is within it.
Gradients are reduced on every microbatch in both, into the sharded gradient, so that no full-size
gradient outlives a backward; with an outer axis of replicas over both axes, as torch does unasked.
Parameters are stored in the main dtype; `MixedPrecisionPolicy`
gathers and computes in the compute dtype and reduces in the gradient communication dtype. A model
on the meta device is sharded there, and each rank then writes its own rows.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from bench.engines.counted_collectives import CountedAllGather, CountedReduceScatter
from bench.engines.dtypes import TORCH_DTYPES, main_dtype
from bench.engines.inspection import StockInspection
from bench.engines.ring_bytes import RingBytes
from bench.engines.stock import StockEngine, scaled_backward
from bench.errors import UnsupportedError
from bench.models.initialisation import materialise, takes_meta
from bench.models.sharding import DATA, OUTER, mesh_of, tensor_mesh, units
from bench.spec import ResolvedDtypes, ResolvedRun, StrategyName

_RESHARD_AFTER_FORWARD: dict[StrategyName, bool] = {
    "optim_grads": False,
    "optim_grads_params": True,
}


@takes_meta
class Fsdp2Engine(StockEngine):
    """Sharded weights, gradients and optimizer state, as torch ships it.

    Bytes are counted in the collectives that fully_shard calls. A subclass has another one.
    """

    _fully_shard: Any = staticmethod(fully_shard)

    model: Any

    def __init__(self, model: nn.Module, resolved: ResolvedRun, device: torch.device) -> None:
        part = resolved.engine.setting("reshard_after_forward")
        self._reshard_after_forward: bool | int = part or _RESHARD_AFTER_FORWARD[resolved.strategy]
        outer = resolved.engine.outer_size
        self._ring = RingBytes(resolved.data_parallel)
        self._all_gather = CountedAllGather(self._ring)
        self._reduce_scatter = CountedReduceScatter(self._ring, replicas=outer)
        compute = TORCH_DTYPES[resolved.dtypes.compute]
        model = model.to(main_dtype(resolved.dtypes))
        self._unit_bytes = _unit_bytes(model, compute)
        self._offloads = bool(resolved.engine.setting("offload"))
        self._shard(model, resolved.dtypes, device, outer)
        self._gathered_until_last = (
            self._reshard_after_forward is False and resolved.microbatches > 1
        )
        super().__init__(model, resolved)

    def _shard(
        self, model: nn.Module, dtypes: ResolvedDtypes, device: torch.device, outer: int
    ) -> None:
        cut = tensor_mesh(model)
        # Of a mesh of both, since fully_shard asks for one parent of its axes and the other.
        own = (OUTER, DATA) if outer > 1 else (DATA,)
        mesh = mesh_of(device, dist.get_world_size(), outer=outer) if cut is None else cut[own]
        # Inputs are not cast: activations already have the compute dtype, and the rotary tables,
        # which are inputs of a layer, must stay FP32.
        policy = MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPES[dtypes.compute],
            reduce_dtype=TORCH_DTYPES[dtypes.grad_comm],
            cast_forward_inputs=False,
        )
        # Only an accelerator's runtime pins.
        host = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        both = {
            "mesh": mesh,
            "mp_policy": policy,
            "offload_policy": host if self._offloads else OffloadPolicy(),
        }
        with _refusals():
            for layer in units(model):
                self._fully_shard(layer, reshard_after_forward=self._reshard_after_forward, **both)
            self._fully_shard(model, reshard_after_forward=False, **both)
        self._begin(model, device)

    def _begin(self, model: nn.Module, device: torch.device) -> None:
        """Give what is on the meta device memory and values, and count what is sent."""
        materialise(model, device)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(self._all_gather)
                module.set_custom_reduce_scatter(self._reduce_scatter)

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        """Every microbatch reduces into the sharded gradient; see the module's docstring."""
        if self._gathered_until_last:
            self.model.set_reshard_after_backward(is_last)
        with _refusals():  # what units share is looked at in the first pass
            loss = self.model(tokens, targets)
        return scaled_backward(loss, scale)

    def memory_by_category(self) -> dict[str, int]:
        """Sharded tensors as measured; gathered weights by the schedule; buffers as allocated.

        Gathered weights: the root, and of the layers `gathered_at_once`. Communication: the largest
        gather plus the largest reduction (input and output), as fully_shard requested them.
        """
        root, layers = self._unit_bytes
        persistent = self.persistent_bytes()
        if self._offloads:
            persistent = dict.fromkeys(persistent, 0)
        communication = self._all_gather.largest_bytes + self._reduce_scatter.largest_bytes
        return persistent | {
            "compute_weights": root + gathered_at_once(layers, self._reshard_after_forward),
            "communication_buffers": communication,
        }

    def inspection(self) -> StockInspection:
        """For `mfsdp-bench validate`."""
        return StockInspection(self.model, autocast=False)

    def code_path(self) -> str:
        """The file of torch's fully_shard."""
        return inspect.getfile(inspect.unwrap(fully_shard))


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn a refusal of torch's into UnsupportedError; a front's errors stay what they are."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError or "fully_shard" not in str(error):
            raise
        reason = f"fully_shard of torch {torch.__version__} refuses it: {error}"
        raise UnsupportedError("engine-refuses", reason) from error


def gathered_at_once(layers: Sequence[int], reshard_after_forward: bool | int) -> int:
    """The most bytes of layers that are gathered at one time, from the bytes of each in order.

    All of them, or a layer and the next one, which is prefetched. With a number, also the parts
    that are kept for the backward pass.
    """
    if reshard_after_forward is False:
        return sum(layers)
    kept = 0 if reshard_after_forward is True else sum(layers) // reshard_after_forward
    return max(map(sum, pairwise(layers)), default=sum(layers)) + kept


def _unit_bytes(model: nn.Module, compute: torch.dtype) -> tuple[int, list[int]]:
    """Full bytes in the compute dtype of the root's own parameters, and of each layer."""

    def full_bytes(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters()) * compute.itemsize

    layers = [full_bytes(module) for module in units(model)]
    return full_bytes(model) - sum(layers), layers
