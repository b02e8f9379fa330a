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

What the full buffer holds is said by whether it is `held`, whether it `is_gathered`, and whether
work is under way:

    held  gathered  work   next
    no    no        no     issue: memory, gather
    yes   yes       yes    complete
    yes   yes       no     release: not held, where weights last for a use. install: not held where
                           they last for a version, else of before the step. issue for the other
                           direction, where that has a payload of its own: see [Note: two payloads]
    yes   no        no     of before the step; issue refreshes it in place

[Note: kept part] Released after a forward pass that autograd follows, weights may leave a part of
several ranks' slices, from which a smaller group of ranks puts them together at the next gather.

[Note: two payloads] Where forward and backward passes read different payloads (rows and columns of
MXFP8), there is still one full buffer, and autograd has saved views of it. While activations are
recomputed it holds what a forward pass reads; once the module has run again, whichever way it
ended, what a backward pass reads is gathered into the same memory. So a recomputed unit gathers
columns, rows and columns again. Recomputation that starts inside of a unit is seen only where its
modules gather for themselves, and refused elsewhere.

[Note: offload] Main weights in host memory are copied to the device where they would be cast: for
the gather that sends them, on the copy-in stream, or into weights that stay, when they have been
updated. The host waits for a copy before anybody may write main weights again: where the gather is
waited for, and in `install`.

Where the outer axis shards the optimizer, the source is refreshed from the outer sub-shards before
the first inner gather that follows an update: once per cycle and bucket, in any microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch

from mfsdp_core.comm.data_parallel import AxisCommunicators
from mfsdp_core.comm.torch_backend import Communicator, Done, Pending
from mfsdp_core.errors import LifecycleError
from mfsdp_core.events import Event, EventBus
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.memory.allocators import Allocator, DBuffer
from mfsdp_core.plan.payload import BOTH, WEIGHTS
from mfsdp_core.plan.prefetch import Direction
from mfsdp_core.plan.strategy import Collective, Placement
from mfsdp_core.precision.codec import Shard
from mfsdp_core.precision.transformer_engine import PrimaryBucket
from mfsdp_core.runtime.bucket_spec import BucketSpec
from mfsdp_core.runtime.calls import NO_BACKWARD, current_backward


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
        on_move: Callable[[DBuffer | None], None],
        events: EventBus,
    ) -> None:
        self._spec = spec
        self._allocators = allocators
        self._gather = communicators.gather
        self.role = communicators.gather.role
        self._outer = communicators.outer
        table, strategy = spec.buffers, spec.strategy
        self.full = allocators.buffer(table, "compute_weights")
        self._lifetime = self.full.row.lifetime
        self.comes_and_goes = self._lifetime == "use"
        codec = self._codec = spec.codec(self._shard(communicators))
        # See [Note: no full buffer].
        self._primary = codec if isinstance(codec, PrimaryBucket) else None
        self._has_full = self._primary is None
        self._streams = allocators.streams
        self._on_move = on_move
        self._events = events
        self._encoded = [row.payload for row in table.rows if row.role == "payload_shard"]
        self._payloads = {
            row.payload: allocators.buffer(table, "payload", row.payload)
            for row in table.rows
            if row.role == "payload"
        }
        payloads = self._payloads.values()
        self._until_decoded = [one for one in payloads if one.row.lifetime == "gather"]
        self._until_released = [one for one in payloads if one.row.lifetime == "use"]
        self._names = {
            direction: [p.name for p in spec.payloads if direction in p.directions]
            for direction in BOTH
        }
        self._is_whole = strategy.inner.weight_refresh is Collective.NONE
        # This rank's slices of what inner gathers fill.
        replicate, slices = Placement.REPLICATE, spec.layout.slices
        self._own = spec.coordinate.range_of(slices, replicate, strategy.inner.optimizer)
        self.has_two_payloads = self._names["forward"] != self._names["backward"]
        self._work: list[Pending] = []
        self._kept: DBuffer | None = None
        self._partners = communicators.gather
        self._sources: dict[str, torch.Tensor] = {}
        self._parts: dict[str, torch.Tensor] = {}
        self._direction: Direction = "forward"
        self._outer_stale = False
        self.is_gathered = True
        self.full.take()
        if self._has_full:
            self.full.zero_gaps()

    @property
    def full_bytes(self) -> int:
        """Bytes of the full buffer, or of what a forward pass has instead; see `begin`."""
        if self._has_full:
            return self.full.size_bytes
        names = [name for name in self._names["forward"] if name in self._payloads]
        return sum(self._payloads[name].size_bytes for name in names)

    @property
    def is_for_backward(self) -> bool:
        """Whether what is gathered now, or was last, is what a backward pass reads."""
        return self._direction == "backward"

    def serves(self, direction: Direction) -> bool:
        """Whether what a pass in that direction reads is there or under way."""
        return self.is_gathered and not (self.has_two_payloads and direction != self._direction)

    def keep_part(self, partners: Communicator | None) -> None:
        """See [Note: kept part]. partners: the smaller group, of neighbours; None: keep nothing."""
        if self._kept is not None:
            self._kept.give()
        self._kept = None
        if partners is not None:
            each = len(self.full.row.slices) // partners.size
            held = range(partners.rank * each, (partners.rank + 1) * each)
            row = self.full.row._replace(role="compute_shard", slices=held)
            self._kept, self._partners = DBuffer(row, self._allocators.fresh), partners

    def adopt(self) -> None:
        """Make sources and main weights of the full buffer, which the caller has filled.

        Where there is none, main weights are zeros, and the caller fills them before `begin`.
        """
        table, inner = self._spec.buffers, self._spec.strategy.inner
        sources: dict[str, tuple[DBuffer, range]] = {}
        for payload in self._encoded:
            shard = self._allocators.buffer(table, "payload_shard", payload)
            shard.take().zero_()
            sources[payload] = shard, shard.row.slices
        if table.find("compute_shard"):
            shard = self._allocators.buffer(table, "compute_shard")
            shard.take().copy_(self.full.part(self._own))
            sources[WEIGHTS] = shard, self._own
        elif self._has_full and not self._encoded and not inner.gathers_every_use:
            sources[WEIGHTS] = self.full, self._own
        main = self._allocators.find(table, "main_weights")
        self._is_offloaded = main is not None and main.row.where == "host"
        if main is not None:
            self.main = main.take()
            if self._has_full:
                self.main.copy_(self.full.part(table.owned))
            else:
                self.main.zero_()
            if main.row.is_sent:
                sources[WEIGHTS] = main, table.owned
        self._sources = {name: buffer.part(held) for name, (buffer, held) in sources.items()}
        self._parts = {name: buffer.part(table.owned) for name, (buffer, _) in sources.items()}
        if main is None:
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
        if not self.full.held:
            self._allocate()
            if "materialise" in self._events.wanted:
                self._publish("materialise")
        copy_in = self._streams.copy_in
        self.is_gathered = True  # also if it fails: it can be released, and the reason is seen
        self._direction = direction
        if copy_in is None:
            self._work = self._send(direction)
        else:
            with copy_in.running():
                works = self._send(direction)
                self._work = [*works, copy_in.mark(on_host=self._is_offloaded)]
        return True

    def _send(self, direction: Direction) -> list[Pending]:
        """Start the gathers that a pass in one direction needs."""
        if self._kept is not None and self._kept.held:
            try:
                return [self._partners.all_gather(self.full.data, self._kept.data, self._spec.name)]
            except RuntimeError as error:
                raise self._failed(error) from error
        sources = self._sources
        if self._outer_stale and self._outer is not None:
            for name, source in sources.items():
                self._outer.all_gather(source, self._parts[name], self._spec.name).wait()
            self._outer_stale = False
        if not sources:
            # [Note: cast when gathered]
            sources = {WEIGHTS: self.full.part(self._own)}
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
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self._failed(error) from error
            if self._kept is not None:
                self._kept.give()
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
        if self.comes_and_goes and self.full.held:
            if self._kept is not None:
                self._keep(self._kept)
            self._empty()

    def _keep(self, kept: DBuffer) -> None:
        """After a forward pass with a graph; see [Note: kept part]."""
        follows = torch.is_grad_enabled() and current_backward() == NO_BACKWARD
        if follows and self.is_gathered and not self.is_for_backward:
            kept.take().copy_(self.full.part(kept.row.slices))
            if self._streams.copy_in is not None:
                self._streams.copy_in.follow()

    def _empty(self) -> None:
        """Free the full buffer."""
        self.is_gathered = False
        copy_in, allocator = self._streams.copy_in, self.full.allocator
        if copy_in is None or not allocator.recycles:
            self._free(allocator)
        else:
            with copy_in.behind():
                self._free(allocator)
        if "release" in self._events.wanted:
            self._publish("release")

    def _free(self, allocator: Allocator) -> None:
        allocator.give(self.full)
        if not allocator.recycles:
            self._on_move(None)
        for payload in self._until_released:
            payload.give()
        if self._primary is not None:
            self._primary.drop_copies()

    def install(self, *, anew: bool = False) -> None:
        """Bring updated main weights into the compute copy; other ranks' parts become stale.

        anew: they do not come from those before, so that nothing said of these holds.
        """
        self.complete()
        if self._kept is not None:
            self._kept.give()
        if anew:
            self._codec.forget()
        if self._parts:
            self._codec.encode(self.main, self._parts)
            if self._is_offloaded and (copied := self._streams.copied()) is not None:
                copied.wait()
        strategy = self._spec.strategy
        self._outer_stale = strategy.outer.weight_refresh is Collective.ALL_GATHER
        if not self._is_whole:
            self.is_gathered = False
            if self.full.held and self._lifetime == "version":
                self._empty()
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
        """What the codec of the bucket gets for this rank's part."""
        strategy, layout = self._spec.strategy, self._spec.layout
        axes = [(communicators.inner, strategy.inner), (communicators.outer, strategy.outer)]

        def reduce_max(values: torch.Tensor) -> None:
            for communicator, axis in axes:
                if communicator is not None and axis.shards_optimizer:
                    communicator.all_reduce_max(values, self._spec.name)

        owned, compute = self._spec.buffers.owned, self._spec.dtypes.compute
        return Shard(layout, compute, owned.start, len(owned), reduce_max)

    def _payload(self, name: str) -> torch.Tensor:
        """The memory that a payload is gathered into; the source itself where that is whole."""
        if name == WEIGHTS:
            return self.full.data
        if self._is_whole:
            return self._sources[name]
        return self._payloads[name].take()

    def _decode(self) -> None:
        """Turn the payloads that have arrived into compute weights."""
        gathered = {name: self._payload(name) for name in self._names[self._direction]}
        self._codec.decode(self._direction, gathered, self.full.data)
        copy_in = self._streams.copy_in
        with nullcontext() if copy_in is None else copy_in.behind():
            for payload in self._until_decoded:
                payload.give()

    def _allocate(self) -> None:
        """Storage for the full buffer; in a backward pass, where the forward pass had it."""
        full, copy_in = self.full, self._streams.copy_in
        before, recycles = full.data, full.allocator.recycles
        in_backward = current_backward() != NO_BACKWARD
        if copy_in is None or not recycles:
            full.take(in_place=in_backward)
        else:
            with copy_in.running():
                full.take(in_place=in_backward)
        if copy_in is not None and not recycles:
            copy_in.follow()
        if full.data is not before:
            self._on_move(full)

    def _publish(self, kind: Literal["materialise", "release"]) -> None:
        where = (self.role, self._gather.size, self._spec.name)
        self._events.publish(Event(kind, "", self.full.row.dtype, self.full_bytes, *where))
