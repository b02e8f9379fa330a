"""Engines by name, imported only when asked for: a ddp run never loads the code of another."""

from __future__ import annotations

import importlib
from typing import Final, cast

import torch
from torch import nn

from bench.engines.protocol import Engine, EngineFactory
from bench.spec import EngineName, ResolvedRun

_MODULES: Final[dict[EngineName, str]] = {
    "single": "bench.engines.single",
    "ddp": "bench.engines.ddp",
    "fsdp2": "bench.engines.fsdp2",
    "mfsdp": "bench.engines.mfsdp",
}


def build_engine(model: nn.Module, resolved: ResolvedRun, device: torch.device) -> Engine:
    """The engine of `resolved` around `model`, which it takes over (casts, wraps or shards).

    Every engine but `single` needs an initialised default process group.
    """
    module = importlib.import_module(_MODULES[resolved.engine.name])
    factory = cast("EngineFactory", module.build)
    return factory(model, resolved, device)
