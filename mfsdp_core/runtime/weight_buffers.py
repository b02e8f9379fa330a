"""Weights of one bucket: the compute copy that runs, the main copy that is optimized.

[Note: one copy] Where main and compute weights have the same dtype they share storage. The main
weights are then this rank's part of the *source*, the buffer that inner gathers read:

    parameter    optimizer    source                     main weights
    REPLICATE    REPLICATE    the full compute buffer    all of it
    REPLICATE    FLAT         own slice of it            all of the slice, or its outer sub-shard
    FLAT         FLAT         a shard of its own         all of the shard, or its outer sub-shard

[Note: cast when gathered] Weights that come and go, in another dtype than their main weights, need
no shard in the compute dtype between gathers: the main weights are cast into this rank's part of
the full buffer, from where it is sent. Only where the outer axis shards the optimizer does a shard
of its own collect the outer sub-shards.

[Note: no full buffer] Modules compute with codes of Transformer Engine as they were gathered: the
payloads stay as long as compute weights would, the full buffer has no elements, and the codec lets
the modules' tensors look at the payloads.

State of the compute weights:

    EMPTY ---------issue-------> COMMUNICATING --complete--> READY
    READY ---------issue-------> COMMUNICATING   for the other direction, where codecs send another
                                                 payload; see [Note: two payloads]
    READY ---------release-----> EMPTY           (only where weights last for a use)
    READY ---------install-----> EMPTY           where they last for a version
    READY ---------install-----> PRESERVED       storage is there, the contents are of last step
    PRESERVED -----issue-------> COMMUNICATING   refreshed in place

[Note: two payloads] Where forward and backward passes read different payloads (rows and columns of
MXFP8), there is still one full buffer, and autograd has saved views of it. While activations are
recomputed it holds what a forward pass reads; once the module has run again, whichever way it
ended, what a backward pass reads is gathered into the same memory. So a recomputed unit gathers
columns, rows and columns again. Recomputation that starts inside of a unit is seen only where its
modules gather for themselves, and refused elsewhere.

Where the outer axis shards the optimizer, the source is refreshed from the outer sub-shards before
the first inner gather that follows an update: once per cycle and bucket, in any microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from typing import Literal

import torch

from mfsdp_core.comm.axes import AxisCommunicators
from mfsdp_core.comm.protocol import Done, Pending
from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.errors import LifecycleError
from mfsdp_core.events import Event, EventBus
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.memory.allocators import BufferKey
from mfsdp_core.plan.payload import BOTH, WEIGHTS
from mfsdp_core.plan.prefetch import Direction
from mfsdp_core.plan.strategy import Collective
from mfsdp_core.precision.codec import Shard
from mfsdp_core.precision.transformer_engine import PrimaryBucket
from mfsdp_core.runtime.backward_pass import NO_BACKWARD, current_backward
from mfsdp_core.runtime.bucket_spec import BucketSpec
from mfsdp_core.shard.flat_buffer import FullBuffer, part


class Residency(Enum):
    """Where a bucket's compute weights are."""

    EMPTY = "empty"
    COMMUNICATING = "communicating"
    READY = "ready"
    PRESERVED = "preserved"


class WeightBuffers:
    """Storage, gathering and installation of one bucket's weights.

    on_move: called when the full buffer has another tensor behind it; with None when it has none.
    comes_and_goes: whether the full buffer is freed between uses.
    is_gathered: whether the compute weights are there or under way. has_two_payloads: whether a
    forward pass reads another payload than a backward pass.
    """

    def __init__(
        self,
        spec: BucketSpec,
        communicators: AxisCommunicators,
        allocators: Allocators,
        *,
        on_move: Callable[[FullBuffer | None], None],
        events: EventBus,
    ) -> None:
        self._spec = spec
        self._gather = communicators.gather
        self.role = communicators.gather.role
        self._outer = communicators.outer
        self._lifetime = spec.buffers.get("compute_weights").lifetime
        self.comes_and_goes = self._lifetime == "use"
        self._lasting = allocators.lasting
        codec = self._codec = spec.codec(self._shard(communicators))
        # See [Note: no full buffer].
        self._primary = codec if isinstance(codec, PrimaryBucket) else None
        self._has_full = self._primary is None
        stays = not (self.comes_and_goes and self._has_full)
        self._allocator = allocators.lasting if stays else allocators.weights
        self._streams = allocators.streams
        self._on_move = on_move
        self._events = events
        rows = spec.buffers.rows
        self._encoded = [row.payload for row in rows if row.role == "payload_shard"]
        payloads = {row: BufferKey.of(spec.name, row) for row in rows if row.role == "payload"}
        self._keys = {row.payload: key for row, key in payloads.items()}
        self._until_decoded = [key for row, key in payloads.items() if row.lifetime == "gather"]
        self._until_released = [key for row, key in payloads.items() if row.lifetime == "use"]
        self._names = {
            direction: [p.name for p in spec.payloads if direction in p.directions]
            for direction in BOTH
        }
        self._is_whole = spec.strategy.inner.weight_refresh is Collective.NONE
        self.has_two_payloads = self._names["forward"] != self._names["backward"]
        self._work: list[Pending] = []
        self._sources: dict[str, torch.Tensor] = {}
        self._parts: dict[str, torch.Tensor] = {}
        self._direction: Direction = "forward"
        self._outer_stale = False
        self.state, self.is_gathered = Residency.READY, True
        self._full_key = spec.key("compute_weights")
        self.full = FullBuffer(spec.layout, self._allocator.acquire(self._full_key))
        self._nothing = self.full.data[:0].clone()
        self.full.zero_gaps()

    @property
    def full_bytes(self) -> int:
        """Bytes of the full buffer, or of what a forward pass has instead; see `begin`."""
        if self._has_full:
            return self._full_key.size_bytes
        keys = [self._keys[name] for name in self._names["forward"] if name in self._keys]
        return sum(key.size_bytes for key in keys)

    @property
    def is_for_backward(self) -> bool:
        """Whether what is gathered now, or was last, is what a backward pass reads."""
        return self._direction == "backward"

    def serves(self, direction: Direction) -> bool:
        """Whether what a pass in that direction reads is there or under way."""
        return self.is_gathered and not (self.has_two_payloads and direction != self._direction)

    def adopt(self) -> None:
        """Make sources and main weights of the full buffer, which the caller has filled.

        Where there is none, main weights are zeros, and the caller fills them before `begin`.
        """
        table, inner = self._spec.buffers, self._spec.strategy.inner
        for payload in self._encoded:
            key = self._spec.key("payload_shard", payload)
            self._sources[payload] = self._lasting.acquire(key).zero_()
        if table.find("compute_shard"):
            shard = self._lasting.acquire(self._spec.key("compute_shard"))
            self._sources[WEIGHTS] = shard.copy_(self._own_part())
        elif self._has_full and not self._encoded and not inner.gathers_every_use:
            whole = self.full.data
            self._sources[WEIGHTS] = self._own_part() if inner.shards_optimizer else whole
        if table.find("main_weights"):
            is_sent = self._has_full and not self._sources and self._spec.dtypes.shares_weights
            with self._streams.communicated() if is_sent else nullcontext():
                self.main = self._lasting.acquire(self._spec.key("main_weights"))
            if not self._has_full:
                self.main.zero_()
            else:
                self.main.copy_(self.full.data[slice(*table.owned)])
                if is_sent:
                    self._sources[WEIGHTS] = self.main
        self._parts = {name: self._sub_part(source) for name, source in self._sources.items()}
        if not table.find("main_weights"):
            self.main = self._parts[WEIGHTS]

    def begin(self, *, anew: bool) -> None:
        """Main weights have their first values: encode them, and free what comes and goes.

        anew: values are not those of the full buffer. Collective where a codec is.
        """
        if self._primary is not None:
            self._primary.show({name: self._payload(name) for name in self._encoded})
        if self._encoded or anew:
            self.install(anew=anew)
        self.release()

    def issue(self, direction: Direction) -> bool:
        """Start gathering unless the weights are there or under way; whether it was started."""
        if self.is_gathered:
            if self.serves(direction):
                return False
            self.complete()
        if self.state is Residency.EMPTY:
            self._allocate()
            if "materialise" in self._events.wanted:
                self._publish("materialise")
        copy_in = self._streams.copy_in
        self.state, self.is_gathered = Residency.COMMUNICATING, True
        self._direction = direction
        try:
            if copy_in is None:
                self._work = self._send(direction)
            else:
                with copy_in.running():
                    works = self._send(direction)
                    self._work = [*works, copy_in.mark()]
        except BaseException:
            self.state = Residency.READY  # so that it can be released, and the reason is seen
            raise
        return True

    def _send(self, direction: Direction) -> list[Pending]:
        """Start the gathers that a pass in one direction needs."""
        sources = self._sources
        if self._outer_stale and self._outer is not None:
            for name, source in sources.items():
                self._outer.all_gather(source, self._parts[name], self._spec.name).wait()
            self._outer_stale = False
        if not sources:
            # [Note: cast when gathered]
            sources = {WEIGHTS: self._own_part()}
            self._codec.encode(self.main, sources)
        try:
            return [
                Done()
                if self._is_whole
                else self._gather.all_gather(self._payload(name), sources[name], self._spec.name)
                for name in self._names[direction]
            ]
        except RuntimeError as error:
            raise self._failed(error) from error

    def rendezvous(self) -> None:
        """Before a gather that the pass has had already, see [Note: gathering again]."""
        if not (self._is_whole or self.is_gathered):
            self._gather.rendezvous(self._spec.name)

    def complete(self) -> None:
        """Wait for the gather under way, if there is one.

        Raises:
            LifecycleError: it has failed, on this rank or for want of another one.
        """
        if self._work:
            works, self._work = self._work, []
            self.state = Residency.READY
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self._failed(error) from error
            if self._encoded:
                self._decode()

    def _failed(self, error: RuntimeError) -> LifecycleError:
        """What a backend says of a gather that fails, with what may be the reason."""
        return LifecycleError(
            f"the gather of {self._spec.name} has failed ({error}). Either a rank has "
            "died, or ranks do not run the same: some may leave out a unit, but all that "
            "run it must run it equally often in a pass, and in the same order."
        )

    def release(self) -> None:
        """Free the full buffer, unless this bucket stays materialised."""
        if self._work:
            self.complete()
        if self.comes_and_goes and self.state is not Residency.EMPTY:
            self._empty()

    def _empty(self) -> None:
        """Free the full buffer."""
        self.state, self.is_gathered = Residency.EMPTY, False
        copy_in = self._streams.copy_in
        if copy_in is None or not self._allocator.recycles:
            self._free()
        else:
            with copy_in.behind():
                self._free()
        if "release" in self._events.wanted:
            self._publish("release")

    def install(self, *, anew: bool = False) -> None:
        """Bring updated main weights into the compute copy; other ranks' parts become stale.

        anew: they do not come from those before, so that nothing said of these holds.
        """
        self.complete()
        if anew:
            self._codec.forget()
        if self._parts:
            self._codec.encode(self.main, self._parts)
        strategy = self._spec.strategy
        self._outer_stale = strategy.outer.weight_refresh is Collective.ALL_GATHER
        if not self._is_whole:
            if self.state is not Residency.EMPTY and self._lifetime == "version":
                self._empty()
            elif self.state is not Residency.EMPTY:
                self.state, self.is_gathered = Residency.PRESERVED, False
        elif self._encoded:
            self._direction = "forward"
            self._decode()

    def broadcast(self) -> None:
        """Replace replicated main weights by those of the first rank that has them."""
        strategy = self._spec.strategy
        if self._outer is not None and not strategy.outer.shards_optimizer:
            self._outer.broadcast(self.main, self._spec.name).wait()
        if not strategy.inner.shards_optimizer:
            self._gather.broadcast(self.main, self._spec.name).wait()
        self.install(anew=True)

    def _shard(self, communicators: AxisCommunicators) -> Shard:
        """What the codec of the bucket is told of this rank's part."""
        strategy, layout = self._spec.strategy, self._spec.layout
        axes = [(communicators.inner, strategy.inner), (communicators.outer, strategy.outer)]

        def reduce_max(values: torch.Tensor) -> None:
            for communicator, axis in axes:
                if communicator is not None and axis.shards_optimizer:
                    communicator.all_reduce_max(values, self._spec.name)

        start, end = self._spec.buffers.owned
        size = layout.slice_elements or 1  # none, where all parameters are empty
        compute = self._spec.dtypes.compute
        return Shard(layout, compute, start // size, (end - start) // size, reduce_max)

    def _payload(self, name: str) -> torch.Tensor:
        """The memory that a payload is gathered into; the source itself where that is whole."""
        if name == WEIGHTS:
            return self.full.data
        if self._is_whole:
            return self._sources[name]
        return self._lasting.acquire(self._keys[name])

    def _decode(self) -> None:
        """Turn the payloads that have arrived into compute weights."""
        gathered = {name: self._payload(name) for name in self._names[self._direction]}
        self._codec.decode(self._direction, gathered, self.full.data)
        copy_in = self._streams.copy_in
        with nullcontext() if copy_in is None else copy_in.behind():
            for key in self._until_decoded:
                self._lasting.release(key)

    def _sub_part(self, source: torch.Tensor) -> torch.Tensor:
        """What of a source this rank's main weights are encoded into."""
        if not self._spec.strategy.outer.shards_optimizer:
            return source
        coordinate = self._spec.coordinate
        return part(source, coordinate.outer_rank, coordinate.outer_size)

    def _own_part(self) -> torch.Tensor:
        """This rank's part of the full buffer."""
        coordinate = self._spec.coordinate
        return part(self.full.data, coordinate.inner_rank, coordinate.inner_size)

    def _allocate(self) -> None:
        """Storage for the full buffer; in a backward pass, where the forward pass had it."""
        in_backward = current_backward() != NO_BACKWARD
        copy_in = self._streams.copy_in
        if copy_in is None:
            data = self._allocator.acquire(self._full_key, in_place=in_backward)
        elif self._allocator.recycles:
            with copy_in.running():
                data = self._allocator.acquire(self._full_key, in_place=in_backward)
        else:
            data = self._allocator.acquire(self._full_key)
            copy_in.follow()
        if data is not self.full.data:
            self._move(data)

    def _free(self) -> None:
        self._allocator.release(self._full_key)
        if not self._allocator.recycles:
            self._move(None)
        for key in self._until_released:
            self._lasting.release(key)
        if self._primary is not None:
            self._primary.drop_copies()

    def _move(self, data: torch.Tensor | None) -> None:
        """Let the parameters be views of `data`; None: of nothing."""
        self.full = FullBuffer(self._spec.layout, self._nothing if data is None else data)
        self._on_move(None if data is None else self.full)

    def _publish(self, kind: Literal["materialise", "release"]) -> None:
        self._events.publish(
            Event(
                kind=kind,
                operation="",
                dtype=dtype_name(self._spec.dtypes.compute),
                payload_bytes=self.full_bytes,
                group=self.role,
                group_size=self._gather.size,
                bucket=self._spec.name,
            )
        )
