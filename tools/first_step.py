"""Processor time of an engine's import, of sharding a model, and of its first step.

`python -m tools.first_step fsdp2|mfsdp`, in a process of its own; prints one line of JSON, in
seconds. The model has as many weights as many layers of a real one have, and no size: 400 units of
five weights each on torch's fake process group of four ranks, so that bookkeeping is all there is.
torch itself is loaded before the first clock starts. What is loaded on first use, as by the first
optimizer, counts where that happens: the sum of the three is fair, the import alone is not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

_HOMES: Final = {"fsdp2": "torch.distributed.fsdp", "mfsdp": "mfsdp_core.api"}
_UNITS: Final = 400
_WEIGHTS: Final = 5
_WIDTH: Final = 4


class Unit(nn.Module):
    """[..., 4] to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_WEIGHTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", choices=_HOMES)
    name = parser.parse_args().engine
    torch.set_num_threads(1)
    found, start = {}, time.process_time()
    engine: Any = importlib.import_module(_HOMES[name])
    found["import"] = time.process_time() - start
    # Registers the backend `fake` on import; torch has no public name for it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    model = nn.Sequential(*(Unit() for _ in range(_UNITS)))
    start = time.process_time()
    if name == "fsdp2":
        for unit in model:
            engine.fully_shard(unit)
        sharded = engine.fully_shard(model)
        optimizer = torch.optim.AdamW(sharded.parameters())
    else:
        sharded = engine.fully_shard_model(model, fsdp_unit_modules=[Unit])
        optimizer = engine.fully_shard_optimizer(torch.optim.AdamW(sharded.parameters()))
    found["shard"] = time.process_time() - start
    start = time.process_time()
    sharded(torch.randn(2, _WIDTH)).sum().backward()
    optimizer.step()
    found["step"] = time.process_time() - start
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
