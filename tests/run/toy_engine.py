"""An engine as somebody else writes it: one file, found by its import path. Nothing else is told.

Each rank sums its gradients into one flat buffer and reduces that once, after the last microbatch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.engines.dtypes import main_dtype
from bench.engines.inspection import StockInspection
from bench.engines.ring_bytes import RingBytes
from bench.engines.stock import StockEngine, scaled_backward
from bench.errors import UnsupportedError
from bench.spec import ResolvedRun


class FlatReduce(StockEngine):
    """Replicated weights; gradients averaged over the ranks in one flat buffer."""

    def __init__(self, model: nn.Module, resolved: ResolvedRun, device: torch.device) -> None:
        dtypes = resolved.dtypes
        if resolved.strategy != "no_shard" or resolved.engine.outer_size > 1:
            raise UnsupportedError("replicas-only", "this engine replicates on one axis")
        if {dtypes.compute, dtypes.main_grads, dtypes.grad_comm} != {dtypes.main_params}:
            raise UnsupportedError("one-dtype", "this engine knows one dtype")
        super().__init__(model.to(device, main_dtype(dtypes)), resolved)
        self._ring = RingBytes(dist.get_world_size())

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        loss = scaled_backward(self.model(tokens, targets), scale)
        if is_last:
            self._reduce()
        return loss

    def _reduce(self) -> None:
        # A weight that this rank did not use still takes part, with zeros.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        self._ring.all_reduce(flat.nbytes)
        parts = (flat / dist.get_world_size()).split([grad.numel() for grad in grads])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def memory_by_category(self) -> dict[str, int]:
        return self.persistent_bytes()

    def wire_bytes(self) -> int:
        return self._ring.sent_bytes

    def inspection(self) -> StockInspection:
        return StockInspection(self.model, autocast=False)

    def code_path(self) -> str:
        return __file__


def build(model: nn.Module, resolved: ResolvedRun, device: torch.device) -> FlatReduce:
    """The factory that `engine.name: toy_engine:build` names."""
    return FlatReduce(model, resolved, device)
