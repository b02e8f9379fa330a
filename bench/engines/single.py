"""Engine `single`: no process group; one rank consumes the whole global batch. The reference."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.engines.dtypes import main_dtype
from bench.engines.inspection import StockInspection
from bench.engines.ring_bytes import RingBytes
from bench.engines.stock import StockEngine, autocast, scaled_backward
from bench.models.initialisation import materialise, takes_meta
from bench.spec import ResolvedRun


@takes_meta
class SingleEngine(StockEngine):
    """Plain autograd and optimizer."""

    def __init__(self, model: nn.Module, resolved: ResolvedRun, device: torch.device) -> None:
        model = model.to(main_dtype(resolved.dtypes))
        materialise(model, device)
        super().__init__(model, resolved)
        self._dtypes = resolved.dtypes
        self._device = device
        self._ring = RingBytes(1)  # nothing is sent

    def forward_backward(
        self,
        tokens: Tensor,
        targets: Tensor,
        scale: float,
        is_last: bool,  # noqa: ARG002 - nothing to synchronise
    ) -> Tensor:
        """Gradients accumulate in the main dtype."""
        with autocast(self._dtypes, self._device):
            loss = self.model(tokens, targets)
        return scaled_backward(loss, scale)

    def memory_by_category(self) -> dict[str, int]:
        """Measured on the tensors themselves; autocast's short-lived casts are not in it."""
        return self.persistent_bytes()

    def inspection(self) -> StockInspection:
        """For `mfsdp-bench validate`."""
        return StockInspection(self.model)

    def code_path(self) -> str:
        """This file: there is no implementation under test but torch's autograd."""
        return __file__
