"""An engine given by its import path, as scripts of the fuzzer use it.

Its optimizer is the one that the engine builds: AdamW with the defaults of a sweep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.engines.inspection import LocalRows
from bench.engines.optimizer import build_optimizer
from bench.engines.registry import build_engine
from bench.spec import STRATEGIES
from bench.validate.cases import Case
from bench.validate.joining import joined


class OutsideModel:
    """The engine, called like a model; parameters are looked up by name."""

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


class _Parameter:
    def __init__(self, model: OutsideModel, name: str) -> None:
        self.model, self.name = model, name

    def whole(self, shards: Mapping[str, LocalRows | None]) -> Tensor | None:
        """Put together from all ranks. Collective."""
        held = shards.get(self.name)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, held)
        if any(shard is None for shard in every):
            return None
        return joined(self.name, every, self.model.shapes[self.name])


def sharded_by(engine: str, module: nn.Module, *, strategy: int) -> tuple[OutsideModel, Any]:
    """The engine around `module`, and its optimizer."""
    policy = "fp64" if next(module.parameters()).dtype == torch.float64 else "fp32"
    resolved = Case(
        engine,
        STRATEGIES[strategy],
        policy=policy,  # type: ignore[arg-type]
        ranks=dist.get_world_size(),
        microbatches=2,
    ).resolved("cpu")
    # Before the engine empties them, as ZeRO-3 of DeepSpeed does.
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    built: Any = build_engine(module, resolved, torch.device("cpu"))
    return OutsideModel(built, shapes), _Stepping(built)


class _Stepping:
    def __init__(self, engine: Any) -> None:
        self.step = engine.optimizer_step


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What the engine steps with, for plain torch."""
    train = Case("single", "no_shard").resolved("cpu").train
    return build_optimizer(parameters, train)


def train(model: OutsideModel, batch: Iterable[Tensor], last: bool) -> Tensor:
    """A microbatch."""
    loss: Tensor = model.engine.forward_backward(*batch, 1.0, last)
    return loss


def accumulating(_model: OutsideModel, _last: bool) -> contextlib.AbstractContextManager[None]:
    """Part of `train`."""
    return contextlib.nullcontext()


def finish(_model: OutsideModel, _end: str) -> None:
    """The last microbatch has said so."""


def sharded(model: OutsideModel) -> dict[str, _Parameter]:
    """Parameters by name."""
    return {name: _Parameter(model, name) for name in model.shapes}


def gradient(parameter: _Parameter) -> Tensor | None:
    """Whole, on all ranks."""
    return parameter.whole(parameter.model.engine.inspection().gradients())


def weight(parameter: _Parameter) -> Tensor | None:
    """Whole, on all ranks."""
    return parameter.whole(parameter.model.engine.inspection().weights())


def clip(model: OutsideModel, bound: float) -> Tensor:
    """The norm before clipping."""
    norm: Tensor = model.engine.clip_grad_norm(bound)
    return norm


def load(model: OutsideModel, weights: Mapping[str, Tensor]) -> None:
    """Whole weights; a state dict names tied ones twice."""
    model.engine.inspection().load_whole_weights({n: weights[n] for n in model.shapes})


def forget(model: OutsideModel, _optimizer: object) -> None:
    """Begin a new cycle."""
    model.engine.zero_grad()


def held(_model: OutsideModel) -> dict[str, int]:
    """Not asked."""
    return {}
