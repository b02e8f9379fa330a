"""Engine `mfsdp` with `front: fsdp2`: the core behind a `fully_shard` of FSDP2's signature.

Units, strategies, dtypes and microbatches are those of the engine `fsdp2`, so that the two differ
in who answers the calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import SimpleNamespace

import torch
from torch import Tensor, nn

import mfsdp_core
from bench.engines.fsdp2 import Fsdp2Engine
from bench.engines.inspection import StockInspection
from bench.engines.mfsdp import CoreAccount
from bench.engines.optimizer import optimizer_state_bytes
from bench.models.initialisation import initial_values, takes_meta, write_values
from bench.spec import ResolvedRun
from mfsdp_core import fsdp2
from mfsdp_core.comm.wire_log import WireLog


@takes_meta
class FrontEngine(CoreAccount, Fsdp2Engine):
    """The sharded model and an optimizer of torch."""

    _fully_shard = staticmethod(fsdp2.fully_shard)

    def __init__(self, model: nn.Module, resolved: ResolvedRun, device: torch.device) -> None:
        super().__init__(model, resolved, device)
        alive = weakref.ref(self)  # the ledger is that of the mesh

        def state_bytes() -> int:
            engine = alive()
            return 0 if engine is None else optimizer_state_bytes(engine.optimizer)

        ledger = self._account.ledger.host if self._offloads else self._account.ledger
        ledger.measure("optimizer_state", state_bytes)

    def _begin(self, model: nn.Module, device: torch.device) -> None:
        """Give what is on the meta device memory and values, and follow the core."""
        self.model, values = model, initial_values(model)
        if values is not None:
            model.to_empty(device=device)
            write_values(values, self.parts())
        environment, log = fsdp2.environment_of_module(model), WireLog()
        environment.events.subscribe(log, kinds=("collective",))
        self._account = SimpleNamespace(ledger=environment.ledger, wire_log=log)

    def inspection(self) -> StockInspection:
        """For `mfsdp-bench validate`."""
        return FrontInspection(self.model, autocast=False)


class FrontInspection(StockInspection):
    """Of a model whose shards are cut anywhere."""

    def whole_weights(self) -> dict[str, Tensor]:
        """`gather_full` of every parameter."""
        return {name: mfsdp_core.gather_full(p.detach()) for name, p in self._parameters().items()}

    def load_whole_weights(self, weights: Mapping[str, Tensor]) -> None:
        """`load_state_dict`, strict."""
        self._model.load_state_dict(weights)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """A call of the model; what stays gathered after it would hide the shards."""
        loss: Tensor = self._model(tokens, targets)
        for module in self._model.modules():
            if isinstance(module, fsdp2.FSDPModule):
                module.reshard()
        return loss
