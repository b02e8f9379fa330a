"""What the training loop needs from an engine, and nothing more.

An engine is built from a model (same values on every rank; `bench.models.sharding` says which
modules are units; called with tokens and targets it returns the mean loss), a resolved run and a
device. It owns the optimizer. The gradient that it hands to the optimizer is the mean over
data-parallel ranks of the sum over microbatches of scale * gradient; the loop passes scale = 1 /
microbatches. An engine that is also `bench.engines.inspection.Inspectable` can be validated. A
class that derives from `Engine` leaves out what it does not know: those methods say so here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bench.models.initialisation import Part
from bench.spec import ResolvedRun

UNREPORTED: Final[dict[str, int | None]] = dict.fromkeys(
    ("compute_weights", "gradients", "communication_buffers")
)
"""Memory besides shards and optimizer state, of engines whose package does not report it."""


class Engine(Protocol):
    """One data-parallel rank of a training implementation."""

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        """One microbatch (int64 [micro_batch, seq_len] twice); returns its detached mean loss.

        `is_last` says that the optimizer step follows, so gradients must be complete after it.
        """

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        """Clip in place; the global norm before clipping (scalar tensor, equal on all ranks).

        With an infinite `max_norm` it only measures.
        """

    def optimizer_step(self) -> None:
        """Update the weights; the next forward sees the result on every rank."""

    def zero_grad(self) -> None:
        """Forget the gradients of this step."""

    def set_learning_rate(self, lr: float) -> None:
        """Used by the next `optimizer_step`."""

    def wire_bytes(self) -> int | None:
        """Bytes this rank has sent since it was built (`RingBytes` convention); None if unknown."""
        return None

    def gathered_bytes(self) -> dict[str, int] | None:
        """Of `wire_bytes`, what gathers of weights sent, by torch's name of the dtype on the wire.

        None where the engine does not say; one that was written before may lack the method.
        """
        return None

    def memory_by_category(self) -> Mapping[str, int | None]:
        """The most bytes on this rank by category of `bench.meters.memory`.

        None: in use, but of unknown size, so that no sum counts as the total.
        """

    def pool_plan(self) -> dict[str, Any] | None:
        """Buckets that come and go and the pools they sit in; None where there is no such thing.

        Keys as `mfsdp_core.MegatronFSDP.pool_plan`: allocator, pools, units.
        """
        return None

    def parts(self) -> Sequence[Part]:
        """What this rank holds of the weights that the optimizer updates; none if it does not say.

        A part that another rank holds too is one of both.
        """
        return ()

    def code_path(self) -> str:
        """The file of the implementation under test, as proof of what was measured."""


EngineFactory = Callable[[nn.Module, ResolvedRun, torch.device], Engine]


class Booked(Protocol):
    """Bytes taken or given back; fields as in `bench.record.MemoryChange`."""

    @property
    def category(self) -> str:
        """As `compute_weights`."""

    @property
    def count_bytes(self) -> int:
        """Negative: given back."""

    @property
    def bucket(self) -> str:
        """As `layers.0/0`."""

    @property
    def role(self) -> str:
        """What the bucket's buffer is for."""

    @property
    def in_pool(self) -> bool:
        """Whether the bytes are part of a pool's."""


class LedgerView(Protocol):
    """What is held now, by buffer and by category, and every change from now on."""

    def alive(self) -> Sequence[Booked]:
        """Buffers that exist now."""

    def bytes_by_category(self) -> dict[str, int]:
        """Bytes held now; more than the buffers add up to where something is only measured."""

    def subscribe(self, subscriber: Callable[[Booked], None]) -> Callable[[], None]:
        """Call it with every change; the returned function ends that."""


@runtime_checkable
class HasLedger(Protocol):
    """An engine whose memory can be followed through a step, since it books every buffer.

    What torch's own engines hold can be measured, and no more.
    """

    def ledger(self) -> LedgerView:
        """Its account of buffers."""
