"""The weight of a bucket that is gathered by hooks of its own; see `mfsdp_core.shard.gather_hooks`.

    main rows, padding included --first hook--> inputs --gather--> outputs --second hook--> raw

The hooks run at every gather, on the main weights as they are then, so that a scale computed after
the optimizer's step counts. The outputs are what modules compute with: no full buffer exists
besides. They keep their storage object, which comes and goes, since the second hook may rely on
`raw` being over the same memory as at the first gather. That gather is made when the bucket is
built, because `raw` is what it returns.

One weight has a bucket of its own, so that its shards are even, and padded with zeros behind the
last row, as the first hook expects of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from mfsdp_core.comm.axes import AxisCommunicators
from mfsdp_core.comm.protocol import Done, Pending
from mfsdp_core.errors import ConfigurationError, LifecycleError
from mfsdp_core.events import EventBus
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.memory.allocators import BufferKey
from mfsdp_core.plan.buffers import Lifetime
from mfsdp_core.plan.prefetch import Direction
from mfsdp_core.runtime.bucket import BucketSpec
from mfsdp_core.runtime.weight_buffers import Residency, WeightBuffers, moves_nothing
from mfsdp_core.shard.gather_hooks import (
    POST,
    GatherRequest,
    has_gather_hooks,
    options_of,
    with_values,
)


class HookedWeights(WeightBuffers):
    """Storage, gathering and installation of one such weight. `start` comes before the rest."""

    def __init__(
        self,
        spec: BucketSpec,
        communicators: AxisCommunicators,
        allocators: Allocators,
        *,
        request: GatherRequest,
        events: EventBus,
    ) -> None:
        super().__init__(spec, communicators, allocators, on_move=moves_nothing, events=events)
        self._request = request
        self._keys: list[BufferKey] = []
        self._inner: list[BufferKey] = []
        self._inputs: list[torch.Tensor] = []
        self._shapes: list[torch.Size] = []
        self._made: tuple[torch.Tensor, ...] = ()
        self._metadata: Any = None
        self._sharded: Any = None
        self.raw: nn.Parameter | None = None
        self.state, self.is_gathered = Residency.PRESERVED, False
        self.main = self._lasting.acquire(spec.key("main_weights")).zero_()

    @property
    def full_bytes(self) -> int:
        """Bytes of what is gathered, known after the first gather."""
        return sum(key.size_bytes for key in (*self._keys, *self._inner))

    def start(self, sharded: nn.Parameter) -> nn.Parameter:
        """Gather for the first time; returns the parameter that modules compute with. Collective.

        sharded: the DTensor over the rows of `main`, which hold their values already.

        Raises:
            ConfigurationError: the tensor with hooks does not survive inside of a DTensor.
        """
        if not has_gather_hooks(local := sharded._local_tensor):  # type: ignore[attr-defined]
            raise ConfigurationError(
                f"{self._spec.name}: a tensor with gather hooks does not stay one through detach "
                f"and view, found {type(local).__name__}. Its dispatch must keep the class."
            )
        self._sharded = sharded
        if self._streams.copy_in is not None:
            self._streams.copy_in.follow()
        self.issue("forward")
        self.complete()
        assert self.raw is not None
        if not self._persistent:
            self.release()
        return self.raw

    def install(self, *, anew: bool = False) -> None:
        """Main weights have changed: the next use gathers again."""
        del anew
        self.complete()
        self._enter("invalidate")

    def _send(self, direction: Direction) -> list[Pending]:
        del direction
        inputs, self._metadata = self._request.before(self._shard_with_padding())
        ranks = 1 if self._is_whole else self._gather.size
        keys = [
            BufferKey(self._spec.name, "payload", t.numel() * ranks, t.dtype, f"gathered {number}")
            for number, t in enumerate(inputs)
        ]
        if keys != (self._keys or keys):
            raise LifecycleError(
                f"{self._spec.name}: its hooks, of {type(self._sharded._local_tensor).__name__}, "
                f"want to gather {keys}, and gathered {self._keys} before. Expected the same sizes."
            )
        self._keys = keys
        self._shapes = [tensor.shape for tensor in inputs]
        self._inputs = [_as_bytes(tensor.contiguous().view(-1)) for tensor in inputs]
        return [
            self._gather_one(_as_bytes(self._lasting.acquire(key)), own)
            for key, own in zip(keys, self._inputs, strict=True)
        ]

    def _gather_one(self, full: torch.Tensor, own: torch.Tensor) -> Pending:
        if self._is_whole:
            full.copy_(own)
            return Done()
        return self._gather.all_gather(full, own, self._spec.name)

    def _decode(self) -> None:
        """Let the second hook make `raw` of what has arrived, then forget what the first made."""
        self._make()
        copy_in = self._streams.copy_in
        with nullcontext() if copy_in is None else copy_in.behind():
            self._metadata, self._inputs = None, []

    @torch.no_grad()
    def _make(self) -> None:
        """Make `raw` of what has arrived, or update it."""
        outputs = tuple(
            self._lasting.acquire(key).data.view(-1, *shape[1:])
            for key, shape in zip(self._keys, self._shapes, strict=True)
        )
        after = getattr(self._sharded._local_tensor, POST)
        if self.raw is not None:
            for key in self._inner:
                self._lasting.acquire(key)
            # The same values again are no change of what autograd has saved.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter((self.raw, *self._made)):
                after(outputs, self._metadata, self._request.dtype, out=self.raw)
            return
        made, inner = after(outputs, self._metadata, self._request.dtype)
        self._made = tuple(inner)
        shape = self._request.shape
        stride = torch.empty(shape, device="meta").stride()
        view = torch.as_strided(made, shape, stride, 0)
        self.raw = nn.Parameter(view, requires_grad=self._sharded.requires_grad)
        known = {tensor.untyped_storage().data_ptr() for tensor in outputs}
        for number, tensor in enumerate(inner):
            if tensor.untyped_storage().data_ptr() not in known:
                elements = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
                name = f"made of them {number}"
                key = BufferKey(self._spec.name, "payload", elements, tensor.dtype, name)
                self._lasting.adopt(key, tensor)
                self._inner.append(key)

    def _free_payloads(self, lifetime: Lifetime) -> None:
        if lifetime == "use":
            for key in (*self._keys, *self._inner):
                self._lasting.release(key)

    @torch.no_grad()
    def _shard_with_padding(self) -> torch.Tensor:
        """The shard as the first hook expects it, with what was set on the parameter's."""
        local = self._sharded._local_tensor
        shape = self._request.shape
        rows = self.main.view(-1, *shape[1:])
        if not self._spec.strategy.inner.shards_optimizer:
            rows = rows[: shape[0]]
        shard = with_values(local, rows)
        vars(shard).update(options_of(local))
        return shard


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view that every backend sends: gloo knows no 8-bit floats."""
    is_small_float = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if is_small_float else tensor
