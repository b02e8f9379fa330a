"""How a program drives torch's `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bench.validate.fuzz.drivers.driver import Driver


class Ddp(Driver):
    """With the options of the program."""

    def shard(self, module: Any) -> tuple[Any, Any]:
        """Wrapped whole."""
        model = DistributedDataParallel(module, **self.options)
        return model, self.sgd(model.parameters())

    def sharded(self, model: Any) -> dict[str, Any]:
        """Those of the bare model."""
        return dict(model.module.named_parameters())

    def load(self, model: Any, weights: Mapping[str, Tensor]) -> None:
        """By a state dict."""
        model.module.load_state_dict(weights)


DRIVER = Ddp
