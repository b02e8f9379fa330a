"""How a program drives any other engine: through the methods that all engines have.

Its optimizer is the one that the engine builds: AdamW with the defaults of a sweep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.engines.inspection import LocalRows
from bench.engines.optimizer import build_optimizer
from bench.engines.registry import build_engine
from bench.spec import STRATEGIES
from bench.validate.cases import Case
from bench.validate.drivers.driver import Driver
from bench.validate.joining import joined


class OutsideModel:
    """The engine, called like a model. shapes: of its parameters by name."""

    def __init__(self, engine: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.engine = engine
        self.shapes = shapes

    def __call__(self, *batch: Tensor) -> Tensor:
        """The loss without autograd."""
        loss: Tensor = self.engine.inspection().evaluate(*batch)
        return loss.detach()

    def eval(self) -> None:
        """Nothing: an engine has no such mode."""

    def train(self) -> None:
        """Nothing."""

    def whole(self, name: str, shards: Mapping[str, LocalRows | None]) -> Tensor | None:
        """A tensor put together from the shards of all ranks. Collective."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, shards.get(name))
        if any(shard is None for shard in every):
            return None
        return joined(name, every, self.shapes[name])


class Outside(Driver):
    """A parameter is the model and a name."""

    def shard(self, module: nn.Module) -> tuple[OutsideModel, Any]:
        """The engine around `module`, and its optimizer."""
        is_double = next(module.parameters()).dtype == torch.float64
        resolved = Case(
            self.program.engine,
            STRATEGIES[self.program.strategy],
            policy="fp64" if is_double else "fp32",
            ranks=dist.get_world_size(),
            microbatches=2,
        ).resolved("cpu")
        # Before the engine empties them, as ZeRO-3 of DeepSpeed does.
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        engine: Any = build_engine(module, resolved, torch.device("cpu"))
        return OutsideModel(engine, shapes), SimpleNamespace(step=engine.optimizer_step)

    def sgd(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """What the engine steps with."""
        return build_optimizer(parameters, Case("single", "no_shard").resolved("cpu").train)

    def train(self, model: OutsideModel, batch: Iterable[Tensor], last: bool) -> Tensor:
        """A microbatch."""
        loss: Tensor = model.engine.forward_backward(*batch, 1.0, last)
        return loss

    def accumulating(self, model: OutsideModel, last: bool) -> AbstractContextManager[object]:
        """Part of `train`."""
        del model, last
        return contextlib.nullcontext()

    def sharded(self, model: OutsideModel) -> dict[str, Any]:
        """By name."""
        return {name: (model, name) for name in model.shapes}

    def gradient(self, parameter: tuple[OutsideModel, str]) -> Tensor | None:
        """Put together here."""
        model, name = parameter
        return model.whole(name, model.engine.inspection().gradients())

    def weight(self, parameter: tuple[OutsideModel, str]) -> Tensor | None:
        """Put together here."""
        model, name = parameter
        return model.whole(name, model.engine.inspection().weights())

    def clip(self, model: OutsideModel, bound: float) -> Tensor:
        """By the engine."""
        norm: Tensor = model.engine.clip_grad_norm(bound)
        return norm

    def load(self, model: OutsideModel, weights: Mapping[str, Tensor]) -> None:
        """By the engine; a state dict names tied weights twice."""
        model.engine.inspection().load_whole_weights({n: weights[n] for n in model.shapes})

    def forget(self, model: OutsideModel, optimizer: Any) -> None:
        """By the engine."""
        del optimizer
        model.engine.zero_grad()


DRIVER = Outside
