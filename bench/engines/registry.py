"""Engines by name, imported only when needed: a ddp run never loads the code of another."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from typing import cast

import torch
from torch import nn

from bench.engines.protocol import Engine, EngineFactory
from bench.errors import ConfigError
from bench.models.initialisation import materialise
from bench.spec import EngineRow, ResolvedRun


def build_engine(model: nn.Module, resolved: ResolvedRun, device: torch.device) -> Engine:
    """The engine of `resolved` around `model`, which it takes over (casts, wraps or shards).

    Every engine but those of one process needs an initialised default process group. An engine
    whose factory has no `takes_meta` that is true is given real FP32 parameters.

    Raises:
        ConfigError: no engine has this name, or its factory is not where its row says, or takes
            other arguments.
    """
    row = resolved.engine.known_row
    factory = engine_factory(row)
    with contextlib.suppress(ValueError):  # of a function that has no signature
        signature = inspect.signature(factory)
        try:
            signature.bind(model, resolved, device)
        except TypeError as error:
            raise ConfigError(
                f"engine {row.name}: expected {row.factory}(model, resolved, device); found a "
                f"function that takes {signature}: {error}"
            ) from None
    if not getattr(factory, "takes_meta", False):
        materialise(model, device)
    return factory(model, resolved, device)


def engine_factory(row: EngineRow) -> EngineFactory:
    """The factory of a row.

    Raises:
        ConfigError: its module has no such function.
    """
    module, _, name = row.factory.partition(":")
    factory = getattr(importlib.import_module(module), name, None)
    if not callable(factory):
        described = "nothing of this name" if factory is None else f"{factory!r:.60}"
        raise ConfigError(
            f"engine {row.name}: expected {module} to have a function {name}(model, resolved,"
            f" device) that builds it; found {described}"
        )
    return cast("EngineFactory", factory)
