"""A Llama cut over the ranks of a tensor-parallel group, by torch's own styles.

As in Megatron-LM (arXiv:1909.08053): query, key, value, gate and up are cut by their outputs, the
matrices behind them by their inputs, embedding and head by the vocabulary. Norms stay whole, and so
do activations between layers. Per layer, a forward pass sums activations twice over the group, and
so does a backward pass.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from bench.models.decoder import Decoder
from bench.models.meshes import TENSOR
from bench.spec import TENSOR_PARALLEL_DIMS


def cut(model: Decoder, mesh: DeviceMesh) -> None:
    """Leave this rank its part of every matrix, in place. Collective over the group of `mesh`."""
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
