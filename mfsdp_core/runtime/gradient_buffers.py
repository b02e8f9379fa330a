"""Gradients of one bucket: fill, scale, reduce, land.

A cycle ends with `reset`, that is `zero_grad`, which gives the accumulator's memory back; the first
gradient of the next one takes it again. In a cycle there is one state: whether the own
contribution, which a PARTIAL accumulator holds, has been reduced along either axis. Accumulators of
reduced slices are open until the outer stage. What came afterwards would be reduced twice.

[Note: scaling] The mean over ranks is taken once, on the tensor that enters the collective, never
on the accumulator (R2), and also in a group of one (R3). It is taken in the copy into the bucket,
in the wider of both dtypes, so that a narrower one rounds once. A gradient that opens a cycle which
its own backward pass ends is scaled on its way into the accumulator; `_scaled` remembers which.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from mfsdp_core.comm.data_parallel import AxisCommunicators
from mfsdp_core.comm.torch_backend import Communicator, PendingSum
from mfsdp_core.errors import GradAlreadyReducedError, LifecycleError, NonFiniteGradientError
from mfsdp_core.events import Event, EventBus
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.memory.allocators import DBuffer
from mfsdp_core.plan.dtype_policy import GroupDtypes
from mfsdp_core.plan.options import Options
from mfsdp_core.plan.strategy import AxisPlacements, Collective, Landing, Placement
from mfsdp_core.runtime.bucket_spec import BucketSpec
from mfsdp_core.runtime.calls import inside_backward, leaves_parameters_alone
from mfsdp_core.runtime.nan_guard import BucketGuard

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


class AxisReduction:
    """Reduces a bucket's gradients along one mesh axis, one reduction at a time.

    Along the inner axis on every microbatch or once per cycle, as the placements say. Along the
    outer axis once per cycle, after the inner one has landed: its input is what that has
    accumulated on this rank, and is never scaled again; its result replaces it (see `Landing`).

    slices: of the bucket that are this rank's, and alone valid, afterwards. into: their place in
    the accumulator, while there is one. flight: what is under way: this rank's part of what was
    sent, the collective, the buffer to give back, and whether the result is added.
    """

    into: torch.Tensor

    def __init__(
        self,
        bucket: str,
        axis: AxisPlacements,
        communicator: Communicator,
        slices: range,
        average: bool,
    ) -> None:
        self._bucket = bucket
        self._scatters = axis.reduction is Collective.REDUCE_SCATTER
        self._communicator = communicator
        self._average = average
        self.slices = slices
        self.flight: tuple[torch.Tensor, PendingSum, DBuffer | None, bool] | None = None

    def issue(
        self,
        buffer: DBuffer,
        data: torch.Tensor,
        total: torch.dtype,
        *,
        gives: bool,
        adds: bool = False,
    ) -> None:
        """Start to reduce `data`, which is scaled; total: the dtype in which it is added up.

        buffer: whose memory it is; gives: it is given back when the result has landed. A result
        that is not added goes where it belongs, which saves a copy of it, unless the transport
        cannot.
        """
        name, average, by = self._bucket, self._average, self._communicator
        own, target = data, None
        if self._scatters:
            # A sum is written in its dtype; alone, a copy does whatever is asked.
            fits = by.size == 1 or total is self.into.dtype
            own = buffer.part(self.slices)
            target = self.into if fits and not adds else own
        work = by.reduce(data, target, name, average=average, total=total)
        self.flight = own, work, buffer if gives else None, adds

    def land(self) -> None:
        """Wait for what is under way; its result replaces what is in `into`, or is added to it."""
        if self.flight is None:
            return
        own, work, gives, adds = self.flight
        result = work.wait()
        if adds:
            self.into.add_(result)
        elif result is not self.into and (gives is not None or result is not own):
            self.into.copy_(result)
        self.flight = None
        if gives is not None:
            gives.give()


class GradientBuffers:
    """Accumulator, bucket and reduction of one bucket's gradients.

    drain_oldest: lands a reduction so that its bucket becomes free; False when there is none.
    """

    def __init__(
        self,
        spec: BucketSpec,
        communicators: AxisCommunicators,
        allocators: Allocators,
        *,
        options: Options,
        guard: BucketGuard | None,
        drain_oldest: Callable[[], bool],
        events: EventBus,
    ) -> None:
        self._name = spec.name
        self._layout = spec.layout
        self._axis = spec.strategy.inner
        self.options = options
        self._communicator = communicators.inner
        self._allocators = allocators
        self._drain_oldest = drain_oldest
        self._scale = options.input_scale(spec.coordinate.data_parallel_size, spec.dense_ranks)
        self._factors = allocators.factors
        self._strict = options.on_double_reduction == "raise"
        self._guard = guard
        self._events = events
        self._filled: set[int] = set()
        self._scaled: set[int] = set()
        # What kernels write now, by tensor, with the further memory that they were given for it.
        self._handed_out: dict[int, list[torch.Tensor]] = {}
        # What kernels were given memory for that is still where gradients are collected.
        self._current: set[int] = set()
        self._landed = False
        # Whether the bucket is held: it is being filled, or reduced where every pass reduces.
        self._bucket_open = False
        self._is_reduced = self._outer_issued = False
        # What is accumulated now is added to it in the end; see `Options.reopens`.
        self._carried: torch.Tensor | None = None
        # Counts changes of the reduced gradient, so that it is attached once per change.
        self.revision = 0
        #: Whether gradients accumulate whole, to be reduced once at the end of the cycle.
        self.holds_whole = not self._axis.reduces_every_microbatch
        self._accumulator = allocators.buffer(spec.buffers, "accumulator")
        self._use(spec)
        #: What the optimizer is handed: all of it, this rank's slice, or its outer sub-shard. None:
        #: the cycle has no gradient yet.
        self.reduced: torch.Tensor | None = None
        average, placed = options.averages, spec.coordinate.range_of
        slices, inner, outer = spec.layout.slices, spec.strategy.inner, spec.strategy.outer
        of_inner = placed(slices, Placement.REPLICATE, inner.gradient)
        self._inner = AxisReduction(self._name, inner, communicators.inner, of_inner, average)
        self._outer: AxisReduction | None = None
        if communicators.outer is not None:
            of_outer = placed(slices, outer.gradient, inner.gradient)
            self._outer = AxisReduction(self._name, outer, communicators.outer, of_outer, average)
        if spec.pooled:
            self._begin()

    def _use(self, spec: BucketSpec) -> None:
        self._spec, self._dtypes = spec, spec.dtypes
        self._bucket = self._allocators.find(spec.buffers, "grad_bucket")
        self._outer_bucket = self._allocators.find(spec.buffers, "outer_bucket")

    @property
    def has_open_bucket(self) -> bool:
        """Whether gradients wait in a bucket that no reduction has taken yet."""
        return self._bucket_open and self._inner.flight is None

    @property
    def is_live(self) -> bool:
        """Whether a buffer in the communication dtype exists now."""
        reductions = self._inner, self._outer
        is_moving = any(one is not None and one.flight is not None for one in reductions)
        return self._bucket_open or is_moving

    @property
    def reduces_in_place(self) -> bool:
        """Whether a reduction takes no memory and nothing follows it: it may land at any time."""
        whole = self._axis.reduction is Collective.ALL_REDUCE and self._bucket is None
        alone = whole and self._outer is None
        return alone and not (self._communicator.takes_scratch or self._dtypes.widens_sums)

    @property
    def awaits_reduction(self) -> bool:
        """Whether a whole, un-reduced accumulator is due at the end of the cycle."""
        return self.holds_whole and not self._is_reduced

    @property
    def awaits_outer(self) -> bool:
        """Whether the outer stage of the cycle has not been issued; False without an outer axis."""
        return self._outer is not None and not self._outer_issued

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
            collects = self._bucket if self._bucket and not self.holds_whole else self._accumulator
            shape = self._layout.slots[index].shape
            return torch.zeros(shape, dtype=collects.dtype, device=device)
        self._check_open()
        if not self.holds_whole:
            view = self._open_bucket().tensor(index)
            if in_backward and (index in self._filled or index in self._handed_out):
                view = torch.empty_like(view)
                self._handed_out.setdefault(index, []).append(view)
        else:
            view = self._open_whole().tensor(index)
            if index not in self._filled:
                view.zero_()
                self._filled.add(index)
            if index in self._scaled:
                view.div_(self._scale)
                self._scaled.discard(index)
        if in_backward:
            self._handed_out.setdefault(index, [])
        self._current.add(index)
        return view

    def written(self, index: int) -> None:
        """A kernel wrote the gradient of tensor `index` into `target` itself.

        Raises:
            LifecycleError: into memory from before gradients were cleared or reduced.
        """
        if index not in self._current:
            raise LifecycleError(
                f"a kernel wrote the gradient of tensor {index} of {self._name} into memory that "
                "is no longer in use: get_main_grad() was called before zero_grad(), or before a "
                "reduction. Call it in the backward pass that writes."
            )
        again = self._handed_out.pop(index, [])
        view = (self._open_whole() if self.holds_whole else self._open_bucket()).tensor(index)
        filled = not self.holds_whole and index in self._filled
        for more in again:
            view.add_(more, alpha=self._scale if filled else 1.0)
        if self._guard is not None:
            self._guard.check_parameter(index, view)
        if not self.holds_whole:
            if self._scale != 1.0 and not filled:
                view.mul_(self._scale)
            self._filled.add(index)

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
            self._guard.check_parameter(index, gradient)
        if not self.holds_whole:
            view, scale = self._open_bucket().tensor(index), self._scale
        else:
            whole = self._accumulator if self.reduced is not None else self._open_whole()
            view = whole.tensor(index)
            if is_last and index not in self._filled and self._may_scale(gradient):
                self._scaled.add(index)
            scale = self._scale if index in self._scaled else 1.0
        if index in self._filled:
            view.add_(gradient, alpha=scale)
        elif gradient.dtype == view.dtype and scale != 1.0:
            torch.mul(gradient, scale, out=view)
        else:
            copy_scaled(view, gradient, scale, self._factors)
        self._filled.add(index)

    def issue(self) -> None:
        """Start the reduction of what has been accumulated; missing gradients count as zero.

        Raises:
            LifecycleError: a kernel requested its target, and never said that it had written it.
        """
        if self._handed_out:
            index = min(self._handed_out)
            self._handed_out.clear()
            raise LifecycleError(
                f"a kernel called get_main_grad() of tensor {index} of {self._name} in this "
                "backward pass, and no gradient followed. Expected grad_added_to_main_grad = True "
                "on the parameter, and any tensor of its shape as its gradient."
            )
        if self.holds_whole:
            self._issue_whole(self._open_whole())
        else:
            self._issue_bucket(self._open_bucket())

    def land(self) -> None:
        """Wait for the reduction under way and put its result where the optimizer looks."""
        flight = self._inner.flight
        if flight is None:
            return
        self._inner.land()
        self._landed = True
        self.revision += 1
        own, _, _, adds = flight
        if "land" in self._events.wanted:
            self._publish_landing("add" if adds else "copy", own.nbytes)
        self._bucket_open = False

    def issue_outer(self) -> None:
        """Start the outer stage; the inner one has landed and no microbatch may follow."""
        if self._outer is not None:
            data, bucket = self._inner.into, self._outer_bucket
            if bucket is not None:
                data = bucket.take().copy_(data)
            buffer = bucket or self._accumulator
            self._outer.issue(buffer, data, self._dtypes.reduce, gives=bucket is not None)
            self._outer_issued = self._is_reduced = True

    def land_outer(self) -> None:
        """Wait for the outer stage, if one is under way."""
        if self._outer is not None:
            self._outer.land()
            if self._carried is not None and self._outer_issued and self.reduced is not None:
                self.reduced.add_(self._carried)
                self._carried = None
            self.revision += 1

    def give_back(self) -> bool:
        """Let the accumulator's memory go, in a cycle without gradients; False where none goes."""
        if self._spec.pooled or self.reduced is None:
            return False
        self._accumulator.give()
        self.reduced = None
        for reduction in (self._inner, self._outer):
            if reduction is not None:
                del reduction.into
        return True

    def reset(self) -> None:
        """Begin a new cycle: everything accumulated so far is forgotten."""
        self.land()
        self.land_outer()
        self._carried = None
        self.drop_bucket()
        self._filled.clear()
        self._scaled.clear()
        self._handed_out.clear()
        self._current.clear()
        self._landed = self._is_reduced = self._outer_issued = False

    def drop_bucket(self) -> None:
        """Forget gradients that no reduction has taken yet, where they wait in a bucket."""
        self._handed_out.clear()
        if self._bucket is not None and self.has_open_bucket:
            self._bucket.give()
            self._bucket_open = False
            self._filled.clear()
            self._current.clear()

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradient, if there is one."""
        if self.reduced is not None:
            self.reduced.mul_(factor)
            self.revision += 1

    def _begin(self) -> None:
        """Take the accumulator's memory; its contents are undefined."""
        accumulator = self._accumulator
        accumulator.take()
        self.reduced = self._inner.into = accumulator.part(self._inner.slices)
        if self._outer is not None:
            self.reduced = self._outer.into = accumulator.part(self._outer.slices)

    def _open_whole(self) -> DBuffer:
        if self.reduced is None:
            self._begin()
            if self._guard is not None:  # only it looks at what belongs to no tensor
                self._accumulator.zero_gaps()
        return self._accumulator

    def _issue_bucket(self, bucket: DBuffer) -> None:
        self._zero_missing(bucket)
        if self._guard is not None:
            self._guard.check_buffer(bucket, accumulated=False)
        if self.reduced is None:
            self._begin()
        elif self._is_reduced:
            self._carried = self.reduced.clone()
            self._landed = self._is_reduced = self._outer_issued = False
        adds = self._axis.landing is Landing.ADD and self._landed
        self._inner.issue(bucket, bucket.data, self._dtypes.reduce, gives=True, adds=adds)
        self._filled.clear()
        if self._current:
            self._current.clear()

    def _issue_whole(self, whole: DBuffer) -> None:
        self._check_open()
        self._zero_missing(whole)
        buffer = whole if self._bucket is None else self._bucket
        gives = buffer is not whole
        if gives:
            scale = self._scale if self._guard is None else 1.0
            copy_scaled(self._take_bucket(buffer), whole.data, scale, self._factors)
        if self._guard is not None:
            self._look_before_reducing(buffer, self._guard, gives=gives)
        if not gives or self._guard is not None:
            self._scale_rest(buffer)
        self._inner.issue(buffer, buffer.data, self._dtypes.reduce, gives=gives)
        if self._current:
            self._current.clear()
        self._is_reduced = True

    def _may_scale(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient may be scaled on its way into the whole accumulator, which travels.

        Not where somebody looks at the accumulator first, in its own scale.
        """
        in_place = self._bucket is None and self._guard is None
        return in_place and self._scale != 1.0 and gradient.dtype == self._dtypes.main_grads

    def _scale_rest(self, buffer: DBuffer) -> None:
        """Scale what was not scaled on its way in."""
        if self._scale == 1.0:
            return
        if not self._scaled:
            buffer.data.mul_(self._scale)
            return
        for index in range(len(self._layout.slots)):
            if index not in self._scaled:
                buffer.tensor(index).mul_(self._scale)

    def _look_before_reducing(self, buffer: DBuffer, guard: BucketGuard, *, gives: bool) -> None:
        try:
            guard.check_buffer(buffer, accumulated=True)
        except NonFiniteGradientError:
            if gives:
                buffer.give()
            raise

    def _open_bucket(self) -> DBuffer:
        if self._inner.flight is not None:
            self.land()
        bucket = self._bucket
        assert bucket is not None
        if not self._bucket_open:
            self._take_bucket(bucket)
            self._bucket_open = True
            if self._guard is not None:
                bucket.zero_gaps()
        return bucket

    def _take_bucket(self, bucket: DBuffer) -> torch.Tensor:
        """Memory of a bucket, after waiting for the oldest reductions where a pool is full (I7)."""
        while not bucket.allocator.has_room(bucket) and self._drain_oldest():
            pass
        return bucket.take()

    def _zero_missing(self, buffer: DBuffer) -> None:
        if len(self._filled) == len(self._layout.slots):
            return
        for index in range(len(self._layout.slots)):
            if index not in self._filled:
                buffer.tensor(index).zero_()

    def _check_open(self) -> None:
        if not self._is_reduced or self.options.reopens:
            return
        message = (
            f"the gradient of {self._name} was already reduced in this cycle, and another backward "
            "pass would reduce it twice: no_shard and optim keep whole gradients and reduce them "
            "once, after the last microbatch, while optim_grads and optim_grads_params add up "
            "what every pass has reduced, and allow this. Call zero_grad() of every optimizer "
            "between passes, or run all but the last microbatch in model.no_sync() and the last "
            "one in model.sync(), which works under all four."
        )
        if self._strict:
            raise GradAlreadyReducedError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        self._scaled.clear()
        self._is_reduced = False

    def _publish_landing(self, operation: str, own_bytes: int) -> None:
        dtype, by = self._accumulator.row.dtype, self._communicator
        event = Event("land", operation, dtype, own_bytes, by.role, by.size, self._name)
        self._events.publish(event)
