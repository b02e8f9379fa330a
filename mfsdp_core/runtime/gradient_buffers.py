"""Gradients of one bucket: fill, scale, reduce, land, attach.

The accumulator's placements along the outer and the inner axis are the state of a cycle. Without an
outer axis, the first stays PARTIAL.

    placements    the accumulator holds                    next
    (P, P)        nothing, or this rank's contribution     reduce along the inner axis
    (P, F or R)   what the inner axis has summed up        reduce along the outer axis; where every
                                                           microbatch reduces, also another bucket
    (F or R, ..)  what the optimizer is handed             attach; more would be reduced twice

[Note: gradients on the host] With offload a gradient is copied to host memory when the cycle's last
reduction has landed, and the accumulator goes. The host waits for the copy where the gradient is
attached. What is added to it later is added on the device, where it is brought back. What has been
attached, a cast copy too, shows every sum that lands without an outer axis: users may change it.

A result that has the placements of the accumulator is added; any other replaces what is there: the
own contribution would count twice (R1). `reset`, that is `zero_grad`, gives the memory back.

[Note: scaling] The mean over ranks is taken once, on the tensor that enters the collective, never
on the accumulator (R2), and also in a group of one (R3). It is taken in the copy into the bucket,
in the wider of both dtypes, so that a narrower one rounds once. A gradient that opens a cycle which
its own backward pass ends is scaled on its way into the accumulator; `_filled` has the factors.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mfsdp_core.comm.data_parallel import AxisCommunicators
from mfsdp_core.comm.torch_backend import Communicator, Pending
from mfsdp_core.errors import GradAlreadyReducedError, LifecycleError, NonFiniteGradientError
from mfsdp_core.events import Event, EventBus
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.memory.allocators import DBuffer
from mfsdp_core.plan.dtype_policy import GroupDtypes
from mfsdp_core.plan.strategy import Placement
from mfsdp_core.runtime.bucket_spec import BucketSpec
from mfsdp_core.runtime.calls import inside_backward, leaves_parameters_alone
from mfsdp_core.runtime.nan_guard import NanGuard
from mfsdp_core.runtime.parameters import ManagedParameter, has_hooks, run_hooks
from mfsdp_core.shard.dtensor import local_tensor, name_tensor
from mfsdp_core.shard.sharded_weight import accessors
from mfsdp_core.shard.uneven_shard import shard_like
from mfsdp_core.streams import Work

_PARTIAL = Placement.PARTIAL
#: Placements of an accumulator that holds this rank's own contribution, or nothing.
_OPEN = (_PARTIAL, _PARTIAL)
_NOTHING = torch.empty(0)
_kept = [torch.empty(0)]
#: References to what only a list holds; versions of Python count differently. Those of C++, as
#: autograd's, count as well (torch 2.11 and 2.13).
_ALONE = sys.getrefcount(_kept[0])
_OTHER_GRADIENT = (
    "{name} holds a gradient that is not the reduced one: assigned by hand, or of a loss that was "
    "computed from the sharded parameter outside of the model's forward. Further gradients cannot "
    "be added to it. Change gradients in place, call zero_grad() before the next backward pass, "
    "and compute penalties of weights in the forward of the module that holds them."
)

#: Numbers as tensors of one element, by value and dtype.
Factors = dict[tuple[float, torch.dtype], torch.Tensor]


def copy_scaled(target: torch.Tensor, values: torch.Tensor, scale: float, factors: Factors) -> None:
    """Fill `target` with `values` times `scale` in one pass; multiplied in the wider dtype."""
    if scale == 1.0:
        target.copy_(values)
        return
    wide = torch.promote_types(values.dtype, target.dtype)
    if wide == values.dtype:
        torch.mul(values, scale, out=target)
        return
    if (scale, wide) not in factors:
        factors[scale, wide] = target.new_full((1,), scale, dtype=wide)
    torch.mul(values, factors[scale, wide], out=target)


class _Axis(NamedTuple):
    """A mesh axis that gradients are reduced along.

    result: placement of what is reduced. slices: of the bucket that are this rank's, and alone
    valid, afterwards; also those of the accumulator that the result belongs into.
    """

    communicator: Communicator
    result: Placement
    slices: range


class GradientBuffers:
    """Accumulator, bucket, reduction and hand-over of one bucket's gradients.

    drain_oldest: set by whoever reduces; lands a reduction so that its bucket becomes free, and is
    False when there is none.
    placements: of the accumulator. holds_whole: whether gradients accumulate whole, to be reduced
    once at the end of the cycle. reduced: what the optimizer is handed: all of the accumulator,
    this rank's slice, or its outer sub-shard; None: the cycle has no gradient yet. is_attached:
    whether a reduced gradient of this cycle was handed over.
    """

    def __init__(
        self,
        spec: BucketSpec,
        communicators: AxisCommunicators,
        allocators: Allocators,
        parameters: list[ManagedParameter],
        *,
        guard: NanGuard | None,
        events: EventBus,
    ) -> None:
        self.parameters = parameters
        self.options = spec.options
        self.holds_whole = not spec.strategy.inner.reduces_every_microbatch
        self.placements = _OPEN
        self.reduced: torch.Tensor | None = None
        self.is_attached = False
        self._is_new = True  # whether something has landed since then
        self._is_shown = False  # whether what is attached has it
        self._copied: Work | None = None  # to the host
        self._name = spec.name
        self._slots = spec.layout.slots
        self._allocators = allocators
        self.drain_oldest: Callable[[], bool] = lambda: False
        self._scale = self.options.input_scale(spec.coordinate.data_parallel_size, spec.dense_ranks)
        self._average = self.options.averages
        self._guard = guard
        self._events = events
        # The axis whose reduction leaves no room for more.
        self._closing = 1 if self.holds_whole else 0
        # Tensors that have a gradient, and by what it was multiplied.
        self._filled: dict[int, float] = {}
        # Those that kernels were given memory for which is still where gradients are collected: the
        # further memory for what a pass writes again, None once they have written.
        self._lent: dict[int, list[torch.Tensor] | None] = {}
        # This rank's part of what is being reduced, that of the accumulator, the collective, the
        # buffer to give back, and whether the result is added.
        self._flight: (
            tuple[_Axis, torch.Tensor, torch.Tensor, Pending, DBuffer | None, bool] | None
        ) = None
        self._is_last = False  # whether the cycle is over when that has landed
        # What is accumulated now is added to it in the end; see `Options.reopens`.
        self._carried: torch.Tensor | None = None
        # Gradients as the sharded parameters have them, and the memory that they are views of now.
        self._shards: list[Any] = [None] * len(parameters)
        self._viewed: torch.Tensor | None = None
        self._version = 0  # of a cast copy, when it was handed over
        # Of zeros that a reset has kept: their placements, and their version.
        self._zeros: tuple[Any, int] | None = None
        # What was removed from what is attached, and began anew with a pass that has begun.
        self._removed: set[int] = set()
        self._once = True  # whether what is attached holds one pass, and nobody has seen it before
        # An optimizer that reads decoupled gradients takes them in whatever dtype they have.
        self._attribute = "decoupled_grad" if self.options.use_decoupled_grad else "grad"
        # What a parameter has there now, without reading what is unread; and how it gets another.
        self._held, self._put = accessors(self._attribute)
        self._accumulator = allocators.buffer(spec.buffers, "accumulator")
        self._host = allocators.find(spec.buffers, "host_gradient")
        self._cast = allocators.find(spec.buffers, "grad_cast")
        placed, slices = spec.coordinate.range_of, spec.layout.slices
        inner, outer = spec.strategy.inner.gradient, spec.strategy.outer.gradient
        self._inner = _Axis(communicators.inner, inner, placed(slices, Placement.REPLICATE, inner))
        self._outer = None
        if communicators.outer is not None:
            self._outer = _Axis(communicators.outer, outer, placed(slices, outer, inner))
        self._use(spec)
        self._stays = self._accumulator.row.lifetime == "model"
        if self._stays:
            self._begin()

    def _use(self, spec: BucketSpec) -> None:
        self._spec, self._total = spec, spec.dtypes.reduce
        self._bucket = self._allocators.find(spec.buffers, "grad_bucket")
        self._outer_bucket = self._allocators.find(spec.buffers, "outer_bucket")
        # Where gradients are collected.
        self._collects = self._accumulator
        if not self.holds_whole:
            self._collects = self._allocators.buffer(spec.buffers, "grad_bucket")
        # Whether a gradient may be scaled on its way into the whole accumulator, which travels: not
        # where somebody looks at the accumulator first, in its own scale.
        self._scales_early = self._bucket is None and self._guard is None
        needs = self._bucket or self._outer or self._inner.result is Placement.FLAT
        takes = self._inner.communicator.takes_scratch or spec.dtypes.widens_sums
        #: Whether a reduction takes no memory and nothing follows it: it may land at any time.
        self.reduces_in_place = not (needs or takes)

    @property
    def has_open_bucket(self) -> bool:
        """Whether gradients wait in a bucket that no reduction has taken yet."""
        return not self.holds_whole and self._flight is None and self._collects.held

    @property
    def is_moving(self) -> bool:
        """Whether a reduction is under way."""
        return self._flight is not None

    @property
    def awaits_reduction(self) -> bool:
        """Whether a whole, un-reduced accumulator is due at the end of the cycle."""
        return self.holds_whole and self.placements[1] is _PARTIAL

    @property
    def awaits_outer(self) -> bool:
        """Whether the outer stage of the cycle has not been issued; False without an outer axis."""
        return self._outer is not None and self.placements[0] is _PARTIAL

    def divide_by(self, divisor: float) -> None:
        """Divide gradients by something else than the number of ranks, from the next pass on."""
        self._scale = 1.0 / divisor

    def set_comm_dtype(self, dtypes: GroupDtypes[torch.dtype]) -> None:
        """Use another communication dtype from the next bucket on. Only while nothing is live."""
        self._use(replace(self._spec, dtypes=dtypes))

    def target(self, index: int, device: torch.device) -> torch.Tensor:
        """Where the gradient of tensor `index` belongs now, for kernels that write it themselves.

        They must overwrite it where gradients are reduced per microbatch and add elsewhere. What a
        pass writes a second time, over what is there, it gets other memory for; see `written`. What
        a pass writes that wants no gradients of parameters is lost, in memory of its own.
        """
        in_backward = inside_backward()
        if in_backward and leaves_parameters_alone():
            shape = self._slots[index].shape
            return torch.zeros(shape, dtype=self._collects.dtype, device=device)
        self._check_open()
        view, further = self._open().tensor(index), self._lent.get(index)
        if not self.holds_whole:
            if in_backward and (index in self._filled or further is not None):
                view = torch.empty_like(view)
                further = [*(further or ()), view]
        else:
            if index not in self._filled:
                view.zero_()
            elif self._filled[index] != 1.0:
                view.div_(self._filled[index])
            self._filled[index] = 1.0
        self._lent[index] = (further or []) if in_backward else further
        return view

    def written(self, index: int) -> None:
        """A kernel wrote the gradient of tensor `index` into `target` itself.

        Raises:
            LifecycleError: into memory from before gradients were cleared or reduced.
        """
        if index not in self._lent:
            raise LifecycleError(
                f"a kernel wrote the gradient of tensor {index} of {self._name} into memory that "
                "is no longer in use: get_main_grad() was called before zero_grad(), or before a "
                "reduction. Call it in the backward pass that writes."
            )
        further, self._lent[index] = self._lent[index] or (), None
        view = self._open().tensor(index)
        filled = not self.holds_whole and index in self._filled
        for more in further:
            view.add_(more, alpha=self._scale if filled else 1.0)
        if self._guard is not None:
            self._guard.check_parameter(self.parameters[index], view)
        if not self.holds_whole:
            if self._scale != 1.0 and not filled:
                view.mul_(self._scale)
            self._filled[index] = self._scale

    def accumulate(self, index: int, gradient: torch.Tensor, *, is_last: bool = False) -> None:
        """Take this rank's raw gradient of tensor `index`. is_last: no microbatch will follow.

        Raises:
            GradAlreadyReducedError: the cycle's reduction has already run.
            NonFiniteGradientError: it holds NaN or Inf, and somebody wants to know.
        """
        self._check_open()
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self._guard is not None:
            self._guard.check_parameter(self.parameters[index], gradient)
        collects = self._collects
        if self._flight is not None or not collects.held:
            self._open()
        view, scale, is_filled = collects.tensor(index), self._scale, index in self._filled
        if self.holds_whole:
            early = is_last and self._scales_early and gradient.dtype == view.dtype
            scale = self._filled[index] if is_filled else scale if early else 1.0
        if is_filled:
            view.add_(gradient, alpha=scale)
        elif gradient.dtype == view.dtype and scale != 1.0:
            torch.mul(gradient, scale, out=view)
        else:
            copy_scaled(view, gradient, scale, self._allocators.factors)
        self._filled[index] = scale

    def issue(self, *, is_last: bool) -> None:
        """Start the reduction of what has been accumulated; missing gradients count as zero.

        is_last: none will follow in the cycle, but for the outer stage.

        Raises:
            LifecycleError: a kernel requested its target, and never said that it had written it.
        """
        if self._lent:
            self._refuse_unwritten()
            self._lent.clear()
        self._is_last = is_last
        buffer = self._open()
        if self.holds_whole:
            self._check_open()
        if len(self._filled) < len(self._slots):
            for index in range(len(self._slots)):
                if index not in self._filled:
                    buffer.tensor(index).zero_()
        if self.holds_whole:
            buffer = self._whole_to_reduce(buffer)
        else:
            if self._guard is not None:
                self._guard.check_buffer(self.parameters, buffer, accumulated=False)
            if not self._accumulator.held:
                self._begin()
            if self.options.reopens and self.placements[0] is not _PARTIAL:
                assert self.reduced is not None
                self._carried, self.placements = self.reduced.clone(), _OPEN
            self._filled.clear()
        self._reduce(self._inner, buffer, buffer.data)

    def issue_outer(self) -> None:
        """Start the outer stage; the inner one has landed and no microbatch may follow.

        Its input is what that has accumulated on this rank, and is never scaled again.
        """
        assert self._outer is not None
        if not self._accumulator.held:
            self._begin()
        data, bucket = self._accumulator.part(self._inner.slices), self._outer_bucket
        if bucket is not None:
            data = bucket.take().copy_(data)
        self._reduce(self._outer, bucket or self._accumulator, data)

    def _reduce(self, axis: _Axis, buffer: DBuffer, data: torch.Tensor) -> None:
        """Start to reduce `data`, which is scaled, in the memory of `buffer`.

        A result that is not added goes where it belongs, which saves a copy of it, unless the
        transport cannot.
        """
        outer, inner = self.placements
        after = (outer, axis.result) if axis is self._inner else (axis.result, inner)
        adds = after == self.placements
        by, total, own, target = axis.communicator, self._total, data, None
        into = self._accumulator.part(axis.slices)
        if axis.result is Placement.FLAT:
            # A sum is written in its dtype; alone, a copy does whatever is asked.
            fits = by.size == 1 or total is into.dtype
            own = buffer.part(axis.slices)
            target = into if fits and not adds else own
        work = by.reduce(data, target, self._name, average=self._average, total=total)
        gives = None if buffer is self._accumulator else buffer
        self._flight = axis, own, into, work, gives, adds
        self.placements = after
        self._is_shown = False

    def land(self) -> None:
        """Wait for what is under way; its result replaces what was there, or is added to it."""
        if self._flight is None:
            return
        axis, own, into, work, gives, adds = self._flight
        result = work.wait()
        if adds:
            into.add_(result)
        elif result is not into and (gives is not None or result is not own):
            into.copy_(result)
        self._flight, self._is_new = None, True
        if gives is not None:
            gives.give()
        if axis is self._outer:
            if self._carried is not None and self.reduced is not None:
                self.reduced.add_(self._carried)
                self._carried = None
            self._leave()
            return
        if "land" in self._events.wanted:
            by, operation = axis.communicator, "add" if adds else "copy"
            where = (own.nbytes, by.role, by.size, self._name)
            self._events.publish(Event("land", operation, self._accumulator.row.dtype, *where))
        if self._is_last and self._outer is None:
            self._leave()
        elif self.is_attached and self._outer is None:
            self._show()

    def _leave(self) -> None:
        """See [Note: gradients on the host]."""
        if self._host is not None and self._accumulator.held and self.reduced is not None:
            self.reduced = self._host.take().copy_(self.reduced, non_blocking=True)
            self._copied = self._allocators.streams.copied()
            self._accumulator.give()

    def attach(self, unset: set[int], read: Callable[[], None], *, passes: int) -> bool:
        """Set `.grad` of the sharded parameters, or `.decoupled_grad` where those are requested.

        A view of the reduced gradient where its dtype is that of the main weights, or decoupled;
        else a cast copy that lives until `zero_grad`. What has been attached is left alone until
        another reduction lands: the caller may have clipped, unscaled or removed it. Hooks of the
        sharded parameters run on what they are handed.

        unset: parameters, by id of raw, that this rank has not used; `read` attaches the gradients
        of those that another rank has, once somebody reads them. passes: of the cycle, whose
        gradients are summed up in this one. Returns whether there was a new one.

        Raises:
            LifecycleError: a parameter holds another gradient, which would be lost.
        """
        if not self._is_new:
            return False
        was_attached, removed = self.is_attached, self._removed
        self._once = passes == 1 and not was_attached
        self._is_new, self.is_attached, self._removed = False, True, set()
        if not self._is_shown:
            self._show()
        for index, managed in enumerate(self.parameters):
            shard, held = self._shards[index], self._held(managed.sharded)
            if held is not None and held is not shard:
                raise LifecycleError(_OTHER_GRADIENT.format(name=managed.names[0]))
            is_removed = held is None and was_attached and managed.weight.unread is None
            if is_removed and index not in removed:  # since the last pass: what that added as well
                continue
            if unset and id(managed.raw) in unset:
                managed.weight.unread = read
                continue
            self._put(managed.sharded, shard)
            if has_hooks(managed.sharded):
                run_hooks(managed.sharded, shard, managed.names[0], once=self._once)
        return True

    def _show(self) -> None:
        """Let the gradients have what is reduced, in the memory and dtype that are handed over."""
        self._leave()
        if self._copied is not None:
            self._copied.wait()
        reduced = self.reduced
        assert reduced is not None  # a reduction has landed
        if self._cast is not None:
            reduced = self._cast.take().copy_(reduced)
        self._view(reduced)
        self._version, self._is_shown = self._version_of_copy(), True

    def reads_at_once(self, unset: set[int]) -> bool:
        """Whether a gradient of `unset` goes to a hook, or where nobody sees that it is read."""
        return not unset.isdisjoint(
            id(managed.raw)
            for managed in self.parameters
            if self._attribute != "grad" or has_hooks(managed.sharded)
        )

    def attach_rest(self, unused: set[int]) -> None:
        """Attach what is unread, but for what no rank has used: its gradient is None."""
        for managed, shard in zip(self.parameters, self._shards, strict=True):
            if managed.weight.unread is not None:
                managed.weight.unread = None
                if id(managed.raw) not in unused and shard is not None:
                    self._put(managed.sharded, shard)
                    if has_hooks(managed.sharded):
                        run_hooks(managed.sharded, shard, managed.names[0], once=self._once)

    @property
    def holds_gradients(self) -> bool:
        """Whether a parameter has a gradient."""
        found = any(self._held(managed.sharded) is not None for managed in self.parameters)
        return found or any(
            getattr(p.sharded, self._attribute, None) is not None for p in self.parameters
        )

    def follow_changes(self, used: set[int]) -> None:
        """Add what comes next to the gradients that the user sees: removed ones begin anew.

        used: ids of the raw parameters that have a gradient; those of removed ones go from it.
        """
        if self.reduced is None:
            return
        if self._viewed is not None and self._version_of_copy() != self._version:
            self.reduced.copy_(self._viewed)
        before, self._removed = self._removed, self._shown_as_none()
        if removed := self._removed - before:
            used.difference_update(id(self.parameters[index].raw) for index in removed)
            self._begin_anew(removed)

    def follow_zeros(self) -> None:
        """Zeros that were changed or removed are gradients of a cycle that goes on."""
        if self._zeros is not None:
            placements, version = self._zeros
            self._zeros = None
            # Whole gradients take no further pass: what was put there is overwritten.
            if not self.holds_whole and (self._shown_as_none() or self._version_shown() != version):
                self.placements, self.is_attached = placements, True

    def _shown_as_none(self) -> set[int]:
        """Of parameters that have no gradient, not even one that nobody has read."""
        return {
            index
            for index, managed in enumerate(self.parameters)
            if self._held(managed.sharded) is None and managed.weight.unread is None
        }

    def shows_all(self, used: set[int]) -> bool:
        """Whether parameters have all gradients; `used` as above."""
        return self._is_shown and not any(id(self.parameters[i].raw) in used for i in self._removed)

    def _begin_anew(self, removed: set[int]) -> None:
        """Zeros for these gradients. Who has kept one keeps its numbers: other memory is taken."""
        if self._carried is not None:
            for index in removed:
                self._spec.local_view(index, self._carried).zero_()
            return
        assert self.reduced is not None
        if self._host is not None:
            self._host.give()
            self.reduced = self._host.take().copy_(self.reduced)
        elif not self._stays:
            whole = self._accumulator.data
            self._accumulator.give()
            self._begin()
            self._accumulator.data.copy_(whole)
        self._part_with(removed)
        for index in removed:
            self._spec.local_view(index, self.reduced).zero_()
        if self._cast is not None:
            self._cast.give()
        self._show()

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradient, the cast copy of it that was handed over, and others.

        Others are those that the user has put in the place of what was handed over.
        """
        if self.reduced is not None:
            self.reduced.mul_(factor)
        if not self._is_shown:
            return
        if self._cast is not None:
            self._cast.take().mul_(factor)
            self._version = self._version_of_copy()
        for managed, shard in zip(self.parameters, self._shards, strict=True):
            held = self._held(managed.sharded)
            if held is None or held is shard:
                continue
            own = local_tensor(held)
            if shard is None or own.data_ptr() != local_tensor(shard).data_ptr():
                own.mul_(factor)

    def abandon(self) -> None:
        """Drop what a backward pass that raised has left outside of the accumulator."""
        self._lent = dict.fromkeys(self._lent)
        if self.has_open_bucket:
            self._collects.give()
            self._filled.clear()
            self._lent.clear()
        for managed in self.parameters:
            managed.raw.grad = None

    def reset(self, *, keeps_zeros: bool = False) -> None:
        """Begin a new cycle without gradients; keeps_zeros: with zeros where there were some.

        What is attached as `.grad` the module's own zero_grad has made zero, cast copies included.
        """
        self.land()
        if self.has_open_bucket:
            self._collects.give()
        self._is_shown = False
        self._carried = None
        self._filled.clear()
        self._lent.clear()
        before = self.placements
        self.placements, self.is_attached, self._is_new, self._zeros = _OPEN, False, True, None
        if keeps_zeros and self.reduced is not None and self.holds_gradients:
            self.reduced.zero_()
            self._zeros = before, self._version_shown()
            return
        for managed in self.parameters:
            setattr(managed.sharded, self._attribute, None)
        if self._cast is not None:
            self._cast.give()
        gives = self.reduced is not None and not self._stays
        if gives:
            self.reduced = None
            self._accumulator.give()
            if self._host is not None:
                self._host.give()
        if gives or self._cast is not None:
            self._viewed = None
        self._part_with(range(len(self._shards)))

    def _begin(self) -> None:
        """Take the accumulator's memory; undefined but for a gradient that the host has."""
        accumulator, before = self._accumulator, self.reduced
        accumulator.take()
        self.reduced = accumulator.part((self._outer or self._inner).slices)
        if before is not None:
            self.reduced.copy_(before)

    def _open(self) -> DBuffer:
        """Memory where gradients are collected, once what was there has landed."""
        buffer = self._collects
        if self._flight is not None and not self.holds_whole:
            self.land()
        if not buffer.held:
            if self.holds_whole:
                self._begin()
            else:
                self._take_bucket(buffer)
            if self._guard is not None:  # only it looks at what belongs to no tensor
                buffer.zero_gaps()
        return buffer

    def _whole_to_reduce(self, whole: DBuffer) -> DBuffer:
        """The whole accumulator, or a copy in the dtype of the wire, scaled."""
        buffer = self._bucket or whole
        if buffer is not whole:
            scale = self._scale if self._guard is None else 1.0
            copy_scaled(self._take_bucket(buffer), whole.data, scale, self._allocators.factors)
        if self._guard is not None:
            try:
                self._guard.check_buffer(self.parameters, buffer, accumulated=True)
            except NonFiniteGradientError:
                if buffer is not whole:
                    buffer.give()
                raise
        if buffer is whole or self._guard is not None:
            self._scale_rest(buffer)
        return buffer

    def _scale_rest(self, buffer: DBuffer) -> None:
        """Scale what was not scaled on its way in."""
        if self._scale == 1.0:
            return
        if self._scale not in self._filled.values():
            buffer.data.mul_(self._scale)
            return
        for index in range(len(self._slots)):
            if self._filled.get(index) != self._scale:
                buffer.tensor(index).mul_(self._scale)

    def _take_bucket(self, bucket: DBuffer) -> torch.Tensor:
        """Memory of a bucket, after waiting for the oldest reductions where a pool is full (I7)."""
        while not bucket.allocator.has_room(bucket) and self.drain_oldest():
            pass
        return bucket.take()

    def _refuse_unwritten(self) -> None:
        unwritten = [index for index, further in self._lent.items() if further is not None]
        if unwritten:
            self._lent = dict.fromkeys(self._lent)
            raise LifecycleError(
                f"a kernel called get_main_grad() of tensor {min(unwritten)} of {self._name} in "
                "this backward pass, and no gradient followed. Expected grad_added_to_main_grad = "
                "True on the parameter, and any tensor of its shape as its gradient."
            )

    def _check_open(self) -> None:
        if self.placements[self._closing] is _PARTIAL or self.options.reopens:
            return
        message = (
            f"the gradient of {self._name} was already reduced in this cycle, and another backward "
            "pass would reduce it twice: no_shard and optim keep whole gradients and reduce them "
            "once, after the last microbatch, while optim_grads and optim_grads_params add up "
            "what every pass has reduced, and allow this. Call zero_grad() of every optimizer "
            "between passes, or run all but the last microbatch in model.no_sync() and the last "
            "one in model.sync(), which works under all four."
        )
        if self.options.on_double_reduction == "raise":
            raise GradAlreadyReducedError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        if self.holds_whole:
            self._filled = dict.fromkeys(self._filled, 1.0)
            self.placements = (self.placements[0], _PARTIAL)

    def _version_of_copy(self) -> int:
        """Grows when a cast copy is changed, as a shard or its rows; 0 where there is none."""
        return 0 if self._cast is None or self._viewed is None else self._version_shown()

    def _version_shown(self) -> int:
        """Grows when a gradient that a parameter shows is changed, as a shard or its rows."""
        return sum(one._version for one in (self._viewed, *self._shards) if one is not None)

    def _view(self, reduced: torch.Tensor) -> None:
        """Let the gradients be views of `reduced`, in objects of former cycles if there are any."""
        if self._viewed is reduced:
            return
        self._viewed = reduced
        for index, shard in enumerate(self._shards):
            view = self._spec.local_view(index, reduced)
            if shard is None:
                managed = self.parameters[index]
                made = self._shards[index] = shard_like(view, managed.weight)
                name_tensor(made, f"gradient of {managed.names[0]}")
            else:
                shard._local_tensor = view

    def _part_with(self, removed: Iterable[int]) -> None:
        """Leave gradients to whoever else holds them, with their numbers; of others forget them.

        Memory that stays for ever is not left: they get a copy.
        """
        shards, copies = self._shards, self._stays and self._cast is None
        for index in removed:
            if shards[index] is None:
                continue
            if sys.getrefcount(shards[index]) != _ALONE:
                if copies:
                    shards[index]._local_tensor = shards[index]._local_tensor.clone()
                shards[index] = self._viewed = None
            elif not copies:
                shards[index]._local_tensor = _NOTHING
