"""What the engines built on torch's own data parallelism share: optimizer, clipping, autocast.

Weights are stored in the main dtype. Where the compute dtype differs, the forward runs under
autocast, unless the implementation casts by itself (fsdp2).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bench.engines.dtypes import TORCH_DTYPES, local_tensor, main_dtype
from bench.engines.optimizer import (
    build_optimizer,
    optimizer_state_bytes,
    optimizers_of,
    set_learning_rate,
)
from bench.engines.protocol import Engine
from bench.engines.ring_bytes import RingBytes
from bench.errors import UnsupportedError
from bench.models.initialisation import Part, parts_of
from bench.spec import ResolvedDtypes, ResolvedRun, TrainSpec

_AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)


class StockEngine(Engine):
    """Base of engines with a wrapped `model`, which holds the main weights, and an `optimizer`.

    _ring: counts what the engine sends; None where nobody can.
    """

    model: nn.Module
    optimizer: Any
    _ring: RingBytes | None = None

    def __init__(self, model: nn.Module, resolved: ResolvedRun) -> None:
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizers_of(
            model,
            self.parameters,
            resolved.train,
            lambda own, train: self._optimizer_of(_by_mesh(own), train),
        )

    def _optimizer_of(self, groups: Any, train: TrainSpec) -> Any:
        """The optimizer of these groups of parameters."""
        return build_optimizer(groups, train)

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        """Clip in place by the global 2-norm; returns it, whole on every rank."""
        groups = [group["params"] for group in _by_mesh(self.parameters)]
        if len(groups) == 1:
            return _whole(torch.nn.utils.clip_grad_norm_(self.parameters, max_norm))
        norms = [_whole(torch.nn.utils.get_total_norm(_gradients(group))) for group in groups]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        for group in groups:
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
        return total

    def optimizer_step(self) -> None:
        """One update of the main weights."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients: the next backward pass makes them anew."""
        self.optimizer.zero_grad()

    def set_learning_rate(self, lr: float) -> None:
        """Set it for the next step."""
        set_learning_rate(self.optimizer, lr)

    def parts(self) -> list[Part]:
        """Plain tensors, or rows of DTensors; names are those of the bare model."""
        prefix = "module." if isinstance(self.model, DistributedDataParallel) else ""
        return parts_of(self.model.named_parameters(), prefix)

    def wire_bytes(self) -> int | None:
        """As counted where the engine communicates."""
        return None if self._ring is None else self._ring.sent_bytes

    def gathered_bytes(self) -> dict[str, int] | None:
        """Counted as `wire_bytes`."""
        return None if self._ring is None else dict(self._ring.gathered_bytes)

    def persistent_bytes(self) -> dict[str, int]:
        """Main weights, their gradients (same dtype and placement) and optimizer state."""
        weights = sum(local_tensor(p.data).nbytes for p in self.parameters)
        return {
            "main_weights": weights,
            "gradients": weights,
            "optimizer_state": optimizer_state_bytes(self.optimizer),
        }


def _by_mesh(parameters: Sequence[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """Groups of parameters that torch's operations on lists take together: those on one mesh."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return [{"params": group} for group in groups.values()]


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def scaled_backward(loss: Tensor, scale: float) -> Tensor:
    """Backward of scale * loss; returns the unscaled loss without its graph."""
    (loss if scale == 1.0 else loss * scale).backward()
    return loss.detach()


def autocast(dtypes: ResolvedDtypes, device: torch.device) -> AbstractContextManager[object]:
    """A fresh context for one forward. Raises UnsupportedError where autocast cannot do it."""
    compute = TORCH_DTYPES[dtypes.compute]
    if compute == main_dtype(dtypes):
        return nullcontext()
    if compute not in _AUTOCAST_DTYPES:
        raise UnsupportedError(
            "autocast_dtype",
            f"autocast computes in bf16 or fp16, not in {dtypes.compute} "
            f"on {dtypes.main_params} weights",
        )
    return torch.autocast(device.type, dtype=compute)
