"""How a program drives torch's `DistributedDataParallel`."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from bench.validate.drivers.driver import Driver


class Ddp(Driver):
    """With the options of the program."""

    def shard(self, module: Any) -> tuple[Any, Any]:
        """Wrapped whole."""
        model = DistributedDataParallel(module, **self.options)
        return model, self.sgd(model.parameters())


DRIVER = Ddp
