"""The model of a shape, with its initial values."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from bench.models.decoder import Decoder
from bench.models.experts import spread
from bench.models.factory import MakeBatch, build_user_model
from bench.models.hybrid import Hybrid
from bench.models.initial_values import InitialValues
from bench.models.initialisation import materialise
from bench.models.llama import Llama
from bench.models.low_precision import exchange_layers
from bench.models.sharding import EXPERT, TENSOR, mesh_of
from bench.spec import (
    TENSOR_PARALLEL_DIMS,
    ModelShape,
    Recompute,
    ResolvedRun,
)


def run_model(resolved: ResolvedRun, device: torch.device) -> tuple[nn.Module, MakeBatch | None]:
    """The model of a run, and what makes its batches where it is the user's own.

    A shape is built on the meta device ([Note: models on the meta device]).
    """
    if resolved.shape is None:
        made = build_user_model(resolved, device)
        return made.module, made.make_batch
    model = model_on_meta(resolved.shape, recompute=resolved.recompute, seed=resolved.train.seed)
    model.loss_chunks = resolved.loss_chunks
    exchange_layers(model, resolved.linear, resolved.dtypes.compute)
    _split(model, resolved, device)
    return model, None


def _split(model: Decoder, resolved: ResolvedRun, device: torch.device) -> None:
    """Leave this rank its part, of tensor or expert parallelism."""
    engine, ranks = resolved.engine, resolved.launch.ranks
    for axis, size, split in (
        (TENSOR, engine.tensor_parallel, cut),
        (EXPERT, engine.expert_parallel, spread),
    ):
        if size > 1:
            split(model, mesh_of(device, ranks, outer=engine.outer_size, last=axis, last_size=size))


def build_model(
    shape: ModelShape, *, recompute: Recompute, seed: int, device: torch.device
) -> Decoder:
    """FP32 model on `device` whose values depend on `shape` and `seed` alone.

    Built without values first, so that no default initialisation is computed and thrown away, and
    so that a device model never has a second full copy in host memory.
    """
    model = model_on_meta(shape, recompute=recompute, seed=seed)
    materialise(model, device)
    return model


def model_on_meta(shape: ModelShape, *, recompute: Recompute, seed: int) -> Decoder:
    """The same on the meta device, with the rule of its values."""
    with torch.device("meta"):
        model = empty_model(shape, recompute)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    model.initial_values = InitialValues(seed, model.residual_writes, shapes)
    return model


def empty_model(shape: ModelShape, recompute: Recompute = "none") -> Decoder:
    """The module of `shape` on torch's default device, values undefined."""
    return Llama(shape, recompute) if shape.hybrid is None else Hybrid(shape, recompute)


def cut(model: Decoder, mesh: DeviceMesh) -> None:
    """Leave this rank its part of every matrix of a Llama, in place, by torch's own styles.

    As in Megatron-LM (arXiv:1909.08053): query, key, value, gate and up are cut by their outputs,
    the matrices behind them by their inputs, embedding and head by the vocabulary. Norms stay
    whole, and so do activations between layers, which each pass sums twice per layer over the
    group. Collective over the group of `mesh`.
    """
    group = mesh[TENSOR]
    in_layers = {name: _style(name) for name in TENSOR_PARALLEL_DIMS if "." in name}
    for layer in model.layers:
        parallelize_module(layer, group, in_layers)
    parallelize_module(model, group, {name: _style(name) for name in ("embedding", "head")})
    model.tie()
    model.tensor_mesh = mesh  # type: ignore[assignment]


def _style(name: str) -> ParallelStyle:
    if name == "embedding":
        return RowwiseParallel(input_layouts=Replicate())
    if name == "head":
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel() if TENSOR_PARALLEL_DIMS[name] == 0 else RowwiseParallel()
