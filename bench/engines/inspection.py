"""The part of the engine protocol that `mfsdp-bench validate` needs: what can be looked at.

An engine that offers `inspection()` can be checked, whoever wrote it. The checker asks for tensors
as they lie on this rank and puts them together itself; it never trusts the engine's own gather,
which is one of the things it checks.

A method that an engine has no counterpart for raises `UnsupportedError(rule, reason)`, and the
verdict table lists the check as not applicable with that reason. A class that derives from
`Inspection` writes down what its engine has; all the rest is refused by the methods here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from bench.errors import UnsupportedError
from bench.spec import DtypeName


@dataclass(frozen=True)
class LocalRows:
    """Rows of dim 0 that this rank holds of a parameter-shaped tensor.

    Shards 0 to `parts - 1`, one after another, are the whole tensor; ranks with the same `order`
    hold replicas. A whole tensor is shard 0 of 1. A shard may be empty. flat: `rows` are elements
    of the flattened tensor instead, cut anywhere.
    """

    rows: Tensor
    order: int = 0
    parts: int = 1
    flat: bool = False


@dataclass(frozen=True)
class WireEntry:
    """One collective as the engine itself logged it.

    operation: all_gather, reduce_scatter, all_reduce or broadcast. dtype: as `bfloat16`.
    payload_bytes: of the full buffer. group: `inner` or `outer` data-parallel axis.
    """

    operation: str
    dtype: str
    payload_bytes: int
    group: str
    group_size: int
    bucket: str


@dataclass(frozen=True)
class BucketContents:
    """Parameters that share a flat buffer of `elements`, padding included."""

    name: str
    parameters: tuple[str, ...]
    elements: int


class Inspection(Protocol):
    """What a rank's engine holds. Names are those of the bare model; a tied weight has its first.

    Methods marked collective are called on all ranks at once. autocast: whether another compute
    dtype than that of the main weights comes from autocast, rather than from a cast of the weights.
    """

    autocast: bool

    def gradients(self) -> dict[str, LocalRows | None]:
        """Of every trainable parameter, what the next optimizer step would be handed."""

    def weights(self) -> dict[str, LocalRows]:
        """Of every parameter, the weights that the optimizer updates."""

    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of a forward pass without autograd. Collective."""

    def whole_weights(self) -> dict[str, Tensor]:
        """The engine's own way to whole weights. Collective."""
        raise lacks("has no way to whole weights")

    def load_whole_weights(self, weights: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        """Load a plain state dict, and refuse one that does not fit. Collective."""
        raise lacks("loads no whole weights once it is built")

    def equalise_weights(self) -> None:
        """Give replicas of a weight the first replica's values. Collective."""
        raise lacks("has no call that makes replicas equal")

    def wire(self) -> list[WireEntry]:
        """The engine's own log of collectives since it was built."""
        raise lacks("keeps no log of collectives by bucket")

    def buckets(self) -> list[BucketContents]:
        """Flat buffers in their order."""
        raise lacks("does not say what its buffers hold")

    def held_bytes(self) -> dict[str, int]:
        """The engine's own account, now, by category of `bench.meters.memory`."""
        raise lacks("keeps no ledger of what it holds")

    def gather_ahead(self) -> None:
        """Start gathering weights that the next forward pass needs. Collective."""
        raise lacks("gathers weights only within its passes and its step")

    def finish_gradients(self) -> None:
        """Complete gradients although no microbatch was marked as the last. Collective."""
        raise lacks("reduces only within the backward pass of a marked microbatch")

    def follow(self, write: Callable[[str], None]) -> None:  # noqa: ARG002
        """Call `write` with a line for everything that the engine does from now on."""
        raise lacks("does not tell what it does")

    def exports(
        self,
        folder: Path,  # noqa: ARG002
        tokens: Tensor,  # noqa: ARG002
        targets: Tensor,  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Whole weights by name, by every way out of the engine; `loss`: losses that are equal.

        Files go to the new folder `folder`, the same on all ranks. Collective.
        """
        raise lacks("has no exports of its own")

    def set_wire_dtype(self, dtype: DtypeName) -> None:
        """Reduce gradients in `dtype` from now on, or refuse while a reduction is under way."""
        raise lacks(f"cannot change its communication dtype (to {dtype}) once it is built")


@runtime_checkable
class Inspectable(Protocol):
    """An engine that can be validated."""

    def code_path(self) -> str:
        """As every engine's."""

    def inspection(self) -> Inspection:
        """A view of the engine; cheap, holds nothing but the engine."""


def local_rows(tensor: Tensor, *, outer_is_finer: bool = False) -> LocalRows:
    """The shard behind a plain tensor or a DTensor sharded along dim 0, on one axis or on two.

    On two axes the strided shard is the finer one: its parts lie within the other's.
    outer_is_finer: that of the first axis is, strided or not.
    """
    if not isinstance(tensor, DTensor):
        return LocalRows(tensor.detach())
    mesh = tensor.device_mesh
    sharded = [
        dim
        for dim, placement in enumerate(tensor.placements)
        # Along another dim tensor parallelism has cut it, which is no affair of data parallelism.
        if not isinstance(placement, Replicate) and getattr(placement, "dim", 0) == 0
    ]
    sharded.sort(key=lambda dim: isinstance(tensor.placements[dim], _StridedShard))
    if outer_is_finer:
        sharded.reverse()
    order, parts = 0, 1
    for dim in sharded:
        order = order * mesh.size(dim) + mesh.get_local_rank(dim)
        parts *= mesh.size(dim)
    return LocalRows(tensor.to_local().detach(), order, parts)


def lacks(what: str) -> UnsupportedError:
    """The refusal of what an engine has no counterpart for."""
    return UnsupportedError("not-in-engine", f"the engine {what}")


class StockInspection(Inspection):
    """Of `model`, the wrapped module, whose parameters are plain tensors or DTensors.

    prefix: what the wrapper puts before every name.
    """

    def __init__(self, model: nn.Module, *, prefix: str = "", autocast: bool = True) -> None:
        self.autocast = autocast
        self._model = model
        self._prefix = prefix

    def _parameters(self) -> dict[str, nn.Parameter]:
        named = self._model.named_parameters()
        return {name.removeprefix(self._prefix): parameter for name, parameter in named}

    def gradients(self) -> dict[str, LocalRows | None]:
        """`.grad` of every trainable parameter."""
        return {
            name: None if p.grad is None else local_rows(p.grad)
            for name, p in self._parameters().items()
            if p.requires_grad
        }

    def weights(self) -> dict[str, LocalRows]:
        """The parameters themselves."""
        return {name: local_rows(p.data) for name, p in self._parameters().items()}

    def whole_weights(self) -> dict[str, Tensor]:
        """`full_tensor()` of sharded parameters."""
        return {
            name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
            for name, p in self._parameters().items()
        }

    @torch.no_grad()
    def load_whole_weights(self, weights: Mapping[str, Tensor]) -> None:
        """`load_state_dict`, with whole tensors cut up first where parameters are sharded."""
        own = self._parameters()
        state = {
            self._prefix + name: distribute_tensor(value, p.device_mesh, p.placements)
            if isinstance(p := own[name], DTensor)
            else value
            for name, value in weights.items()
        }
        duplicates = {
            name: self._prefix + first
            for first, parameter in own.items()
            for name, other in self._model.named_parameters(remove_duplicate=False)
            if other is parameter
        }
        state |= {name: state[first] for name, first in duplicates.items() if first in state}
        self._model.load_state_dict(state)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """A call of the model under `no_grad`, without autocast."""
        loss: Tensor = self._model(tokens, targets)
        for module in self._model.modules():
            # What stays gathered after a forward pass could not be loaded into.
            if isinstance(module, FSDPModule):
                module.reshard()
        return loss
