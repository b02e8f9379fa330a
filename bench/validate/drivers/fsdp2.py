"""How a program drives `fully_shard`: torch's, or the core's with the option `front`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from bench.validate.drivers.driver import Driver
from bench.validate.program import Program

_FULL_SHARD = 3


class Fsdp2(Driver):
    """Every unit, then the root."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        own = "front" in self.options
        self.library: Any = importlib.import_module(
            "mfsdp_core.fsdp2" if own else "torch.distributed.fsdp"
        )

    def shard(self, module: Any) -> tuple[Any, Any]:
        """In place."""
        mesh = self.mesh()
        is_full = self.program.strategy == _FULL_SHARD
        reshard = self.options.get("reshard_after_forward", is_full)
        for unit in module.units:
            self.library.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        model = self.library.fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        if self.options.get("reduce_scatter_unused_params"):
            model.set_reduce_scatter_unused_params(True)
        return model, self.sgd(model.parameters())

    @contextlib.contextmanager
    def accumulating(self, model: Any, last: bool) -> Iterator[None]:
        """By its switch, which stays where it is put."""
        if not self.options.get("sync_every_pass"):
            model.set_requires_gradient_sync(last)
        yield

    def sharded(self, model: Any) -> dict[str, Any]:
        """DTensors; the root keeps whole weights after an evaluation."""
        for module in model.modules():
            if isinstance(module, self.library.FSDPModule):
                module.reshard()
        return super().sharded(model)

    def forget(self, model: Any, optimizer: Any) -> None:
        """By the model, where an optimizer cannot: gradients that no pass has reduced."""
        (model if "front" in self.options else optimizer).zero_grad()

    def load(self, model: Any, weights: Mapping[str, Tensor]) -> None:
        """By torch."""
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, dict(weights), options=options)


DRIVER = Fsdp2
