"""Models of users, named by `model.factory: package.module:build`.

    def build(resolved: ResolvedRun, device: torch.device) -> UserModel

It is called once in every rank, after torch's generators have been seeded with `train.seed`, and
must give every rank the same values.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.errors import ConfigError
from bench.spec import ResolvedRun

MakeBatch = Callable[[Sequence[int]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class UserModel:
    """What a factory returns.

    module: FP32, on the device; called with the two tensors of a batch, it returns the mean loss, a
    scalar. unit_classes: its modules that sharding engines gather as one, by class. make_batch:
    sample numbers to two CPU tensors, one row per number; the same number is the same sample on
    every rank and in every run, so that engines see the same data however it is split.
    """

    module: nn.Module
    unit_classes: tuple[type[nn.Module], ...]
    make_batch: MakeBatch


def build_user_model(resolved: ResolvedRun, device: torch.device) -> UserModel:
    """The model that `resolved.factory` makes; the module says its units as ours do.

    Raises:
        ConfigError: there is no such function, or it returns something else.
    """
    path = str(resolved.factory)
    module, _, name = path.partition(":")
    build = getattr(importlib.import_module(module), name, None)
    if not callable(build):
        raise ConfigError(f"model.factory: expected {module} to have a function {name}, found none")
    torch.manual_seed(resolved.train.seed)
    made = build(resolved, device)
    if not isinstance(made, UserModel):
        raise ConfigError(
            f"model.factory: expected {path} to return a bench.models.factory.UserModel, found"
            f" {type(made).__name__}"
        )
    made.module.unit_classes = made.unit_classes  # type: ignore[assignment]
    return made
