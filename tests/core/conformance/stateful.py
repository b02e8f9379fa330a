"""A model with all that makes state odd, and a folder that all ranks see."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.small_model import (
    Small,
)


class Stateful(Small):
    """Ties a weight of a unit to another unit's, and has extra state and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.units[1].up.weight = self.units[0].up.weight
        self.gain = nn.Parameter(torch.empty(()))
        self.kernel = nn.Parameter(torch.empty(3, 2, 5))
        self.register_buffer("count", torch.tensor([1, 2, 257]))
        self.seen: dict[str, Any] = {"steps": 3}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state

    def forward(self, x: Tensor) -> Tensor:
        """As `Small`."""
        return super().forward(x * self.kernel.sum((0, 1))) * (1 + self.gain)


def reread(value: Any) -> Any:
    """What `torch.load` makes, with its defaults, of what `torch.save` wrote."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """The same on all ranks."""
    names: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    try:
        yield Path(names[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(names[0], ignore_errors=True)


def on_first(change: Callable[[], Any]) -> None:
    """Call it on the first rank while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        change()
    dist.barrier()
