"""What a program asks of an engine; a subclass says how the engine does it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from bench.validate.program import Program


class Driver:
    """An engine under the settings of `program`. Defaults are those of torch's own engines."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.options: dict[str, Any] = dict(program.options)

    def mesh(self) -> DeviceMesh:
        """All ranks, or outer x inner ones."""
        ranks = self.program.ranks
        if self.program.mode == "flat":
            return init_device_mesh("cpu", (ranks,))
        return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("outer", "inner"))

    def shard(self, module: Any) -> tuple[Any, Any]:
        """The sharded model and its optimizer."""
        raise NotImplementedError

    def follow(self, model: Any, write: Callable[[str], None]) -> None:
        """Call `write` with what the engine does from now on, if the engine tells."""

    def sgd(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of plain torch, and of the sharded model."""
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def accumulating(self, model: Any, last: bool) -> AbstractContextManager[object]:
        """A pass runs in it. last: the pass completes the gradients."""
        return contextlib.nullcontext() if last else model.no_sync()

    def train(self, model: Any, batch: Iterable[Tensor], last: bool) -> Tensor:
        """A forward and a backward pass; the loss."""
        with self.accumulating(model, last):
            loss: Tensor = model(*batch)
            loss.backward()
        return loss

    def finish(self, model: Any, end: str) -> None:
        """Complete the gradients of a cycle that ends so."""

    def forget(self, model: Any, optimizer: Any) -> None:  # noqa: ARG002
        """Drop the gradients."""
        optimizer.zero_grad()

    def held(self, model: Any) -> dict[str, int]:  # noqa: ARG002
        """Bytes at rest by category, if the engine tells."""
        return {}

    def sharded(self, model: Any) -> dict[str, Any]:
        """Parameters by the names of the bare model, as `gradient` and `weight` take them."""
        return {name.removeprefix("module."): p for name, p in model.named_parameters()}

    def gradient(self, parameter: Any) -> Tensor | None:
        """The whole gradient of a parameter, on all ranks."""
        return None if parameter.grad is None else whole(parameter.grad)

    def weight(self, parameter: Any) -> Tensor | None:
        """The whole weight of a parameter, on all ranks."""
        return whole(parameter.detach())

    def clip(self, model: Any, bound: float) -> Tensor:
        """Clip the gradients; the norm before."""
        return whole(nn.utils.clip_grad_norm_(model.parameters(), bound))

    def load(self, model: Any, weights: Mapping[str, Tensor]) -> None:
        """Take whole weights: a wrapper's own state dict."""
        model.load_state_dict({f"module.{name}": value for name, value in weights.items()})


def whole(value: Tensor) -> Tensor:
    """Gathered, if it is a DTensor."""
    full: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return full
