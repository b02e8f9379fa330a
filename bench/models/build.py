"""The model of a shape, with its initial values."""

from __future__ import annotations

import torch

from bench.models.decoder import Decoder
from bench.models.hybrid import Hybrid
from bench.models.initialisation import initialise
from bench.models.llama import Llama
from bench.spec import ModelShape, Recompute


def build_model(
    shape: ModelShape, *, recompute: Recompute, seed: int, device: torch.device
) -> Decoder:
    """FP32 model on `device` whose values depend on `shape` and `seed` alone.

    Built without values first, so that no default initialisation is computed and thrown away, and
    so that a device model never has a second full copy in host memory.
    """
    with torch.device("meta"):
        model = empty_model(shape, recompute)
    model.to_empty(device=device)
    model.tie()
    initialise(model, model.residual_writes, seed)
    return model


def empty_model(shape: ModelShape, recompute: Recompute = "none") -> Decoder:
    """The module of `shape` on torch's default device, values undefined."""
    return Llama(shape, recompute) if shape.hybrid is None else Hybrid(shape, recompute)
