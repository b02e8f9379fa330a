"""DistributedDataParallel with ZeroRedundancyOptimizer, which is ZeRO stage 1.

Gradients are those of `ddp`. Each rank updates the parameters that torch assigns to it, whole ones,
largest first, and broadcasts them. `overlap_with_ddp` is not offered: it steps within the backward
pass, so nothing could be clipped.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bench.engines.ddp import DdpEngine
from bench.engines.optimizer import build_optimizer, optimizer_state_bytes
from bench.models.initialisation import takes_meta
from bench.spec import ResolvedRun, TrainSpec
from examples.engines import refuse_others

with warnings.catch_warnings():  # that the package compiles with torch.jit, which is deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


class DdpZeroEngine(DdpEngine):
    """Whole weights and gradients; optimizer state of the parameters that a rank owns."""

    def _optimizer_of(self, parameters: Any, train: TrainSpec) -> torch.optim.Optimizer:
        def of_a_rank(owned: Iterable[dict[str, Any]], **_groups_have_them: Any) -> Any:
            return build_optimizer(owned, train)

        constructor: Any = of_a_rank  # torch says a class, and calls it
        self._zero = ZeroRedundancyOptimizer(parameters, constructor, lr=train.lr)
        return self._zero

    def optimizer_step(self) -> None:
        """Update what this rank owns; every parameter is broadcast by its owner.

        A rank forwards of a broadcast what it would send of a gather.
        """
        super().optimizer_step()
        for parameter in self.parameters:
            self._ring.gather(parameter.nbytes, parameter.dtype)

    def persistent_bytes(self) -> dict[str, int]:
        """The state lies in the optimizer that the outer one wraps."""
        owned = optimizer_state_bytes(self._zero.optim)
        return super().persistent_bytes() | {"optimizer_state": owned}

    def code_path(self) -> str:
        """The file of torch's ZeroRedundancyOptimizer."""
        return inspect.getfile(ZeroRedundancyOptimizer)


@takes_meta
def build(model: nn.Module, resolved: ResolvedRun, device: torch.device) -> DdpZeroEngine:
    """What `engine.name` names."""
    refuse_others(resolved, ("optim",), main=("fp32", "fp64"))
    return DdpZeroEngine(model, resolved, device)
