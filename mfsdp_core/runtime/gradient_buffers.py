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

from mfsdp_core.comm.axes import AxisCommunicators
from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.errors import GradAlreadyReducedError, LifecycleError, NonFiniteGradientError
from mfsdp_core.events import Event, EventBus
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.memory.allocators import BufferKey
from mfsdp_core.plan.dtype_policy import GroupDtypes
from mfsdp_core.plan.options import Options
from mfsdp_core.plan.strategy import Collective, Landing
from mfsdp_core.runtime.axis_reduction import AxisReduction
from mfsdp_core.runtime.backward_pass import inside_backward, leaves_parameters_alone
from mfsdp_core.runtime.bucket_spec import BucketSpec
from mfsdp_core.runtime.nan_guard import BucketGuard
from mfsdp_core.shard.flat_buffer import FullBuffer, copy_scaled


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
        self._spec = spec
        self._name = spec.name
        self._layout = spec.layout
        self._axis = spec.strategy.inner
        self._dtypes, self.options = spec.dtypes, options
        self._bucket_key = spec.key_or_none("grad_bucket")
        self._outer_key = spec.key_or_none("outer_bucket")
        self._communicator = communicators.inner
        self._allocator, self._outer_allocator = allocators.gradients, allocators.outer
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
        self._bucket: FullBuffer | None = None
        self._is_reduced = self._outer_issued = False
        # What is accumulated now is added to it in the end; see `Options.reopens`.
        self._carried: torch.Tensor | None = None
        # Counts changes of the reduced gradient, so that it is attached once per change.
        self.revision = 0
        #: Whether gradients accumulate whole, to be reduced once at the end of the cycle.
        self.holds_whole = not self._axis.reduces_every_microbatch
        self._accumulator_key = spec.key("accumulator")
        self._accumulators = allocators.of_cycles
        self._whole: FullBuffer | None = None
        #: What the optimizer is handed: all of it, this rank's slice, or its outer sub-shard. None:
        #: the cycle has no gradient yet.
        self.reduced: torch.Tensor | None = None
        average = options.averages
        self._inner = AxisReduction(
            self._name, self._axis, self._communicator, self._allocator, average=average
        )
        self._outer: AxisReduction | None = None
        if communicators.outer is not None:
            axis, by = spec.strategy.outer, communicators.outer
            self._outer = AxisReduction(
                self._name, axis, by, self._outer_allocator, average=average
            )
        if spec.pooled:
            self._begin()

    @property
    def _open_key(self) -> BufferKey:
        """Of the bucket that gradients of every microbatch are filled into."""
        return self._spec.key("grad_bucket") if self._bucket_key is None else self._bucket_key

    @property
    def has_open_bucket(self) -> bool:
        """Whether gradients wait in a bucket that no reduction has taken yet."""
        return self._bucket is not None and self._inner.flight is None

    @property
    def is_live(self) -> bool:
        """Whether a buffer in the communication dtype exists now."""
        reductions = self._inner, self._outer
        is_moving = any(one is not None and one.flight is not None for one in reductions)
        return self._bucket is not None or is_moving

    @property
    def reduces_in_place(self) -> bool:
        """Whether a reduction takes no memory and nothing follows it: it may land at any time."""
        whole = self._axis.reduction is Collective.ALL_REDUCE and self._bucket_key is None
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
        self._dtypes = dtypes
        spec = self._spec = replace(self._spec, dtypes=dtypes)
        self._bucket_key = spec.key_or_none("grad_bucket")
        self._outer_key = spec.key_or_none("outer_bucket")

    def target(self, index: int, device: torch.device) -> torch.Tensor:
        """Where the gradient of tensor `index` belongs now, for kernels that write it themselves.

        They must overwrite it where gradients are reduced per microbatch and add elsewhere. What a
        pass writes a second time, over what is there, it gets other memory for; see `written`. What
        a pass writes that wants no gradients of parameters is lost, in memory of its own.
        """
        in_backward = inside_backward()
        if in_backward and leaves_parameters_alone():
            key = self._accumulator_key if self.holds_whole else self._open_key
            return torch.zeros(self._layout.slots[index].shape, dtype=key.dtype, device=device)
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
            view = self._open_whole().tensor(index)
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
            LifecycleError: a kernel asked for its target, and never said that it had written it.
        """
        if self._handed_out:
            index = min(self._handed_out)
            self._handed_out.clear()
            raise LifecycleError(
                f"a kernel asked for get_main_grad() of tensor {index} of {self._name} in this "
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
        adds = self._axis.landing is Landing.ADD and self._landed
        self._inner.land(adds=adds)
        self._landed = True
        self.revision += 1
        self._publish_landing("add" if adds else "copy", flight[0].nbytes)
        self._bucket = None

    def issue_outer(self) -> None:
        """Start the outer stage; the inner one has landed and no microbatch may follow."""
        if self._outer is not None:
            data, key = self._inner.own, self._outer_key
            if key is not None:
                data = self._outer_allocator.acquire(key).copy_(data)
            self._outer.issue(data, key, self._dtypes.reduce)
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
        self._accumulators.release(self._accumulator_key)
        self._inner.leave()
        if self._outer is not None:
            self._outer.leave()
        self.reduced = self._whole = None
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
        if self.has_open_bucket:
            self._allocator.release(self._open_key)
            self._bucket = None
            self._filled.clear()
            self._current.clear()

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradient, if there is one."""
        if self.reduced is not None:
            self.reduced.mul_(factor)
            self.revision += 1

    def _begin(self) -> torch.Tensor:
        """Take the accumulator's memory; its contents are undefined."""
        data = self._accumulators.acquire(self._accumulator_key)
        self.reduced = self._inner.into(data)
        if self._outer is not None:
            self.reduced = self._outer.into(self.reduced)
        return data

    def _open_whole(self) -> FullBuffer:
        if self._whole is None:
            self._whole = FullBuffer(self._layout, self._begin())
            self._zero_gaps(self._whole)
        return self._whole

    def _issue_bucket(self, bucket: FullBuffer) -> None:
        self._zero_missing(bucket)
        if self._guard is not None:
            self._guard.check_buffer(bucket, accumulated=False)
        if self.reduced is None:
            self._begin()
        elif self._is_reduced:
            self._carried = self.reduced.clone()
            self._landed = self._is_reduced = self._outer_issued = False
        adds = self._axis.landing is Landing.ADD and self._landed
        self._inner.issue(bucket.data, self._open_key, self._dtypes.reduce, adds=adds)
        self._filled.clear()
        if self._current:
            self._current.clear()

    def _issue_whole(self, whole: FullBuffer) -> None:
        self._check_open()
        self._zero_missing(whole)
        data, key = whole.data, self._bucket_key
        if key is not None:
            data = self._acquire_bucket(key)
            scale = self._scale if self._guard is None else 1.0
            copy_scaled(data, whole.data, scale, self._factors)
        self._look_before_reducing(data, key)
        if key is None or self._guard is not None:
            self._scale_rest(data)
        self._inner.issue(data, key, self._dtypes.reduce)
        if self._current:
            self._current.clear()
        self._is_reduced = True

    def _may_scale(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient may be scaled on its way into the whole accumulator, which travels.

        Not where somebody looks at the accumulator first, in its own scale.
        """
        in_place = self._bucket_key is None and self._guard is None
        return in_place and self._scale != 1.0 and gradient.dtype == self._dtypes.main_grads

    def _scale_rest(self, data: torch.Tensor) -> None:
        """Scale what was not scaled on its way in."""
        if self._scale == 1.0:
            return
        if not self._scaled:
            data.mul_(self._scale)
            return
        whole = FullBuffer(self._layout, data)
        for index in range(len(self._layout.slots)):
            if index not in self._scaled:
                whole.tensor(index).mul_(self._scale)

    def _look_before_reducing(self, data: torch.Tensor, copy: BufferKey | None) -> None:
        if self._guard is None:
            return
        try:
            self._guard.check_buffer(FullBuffer(self._layout, data), accumulated=True)
        except NonFiniteGradientError:
            if copy is not None:
                self._allocator.release(copy)
            raise

    def _open_bucket(self) -> FullBuffer:
        if self._inner.flight is not None:
            self.land()
        if self._bucket is None:
            data = self._acquire_bucket(self._open_key)
            self._bucket = FullBuffer(self._layout, data)
            self._zero_gaps(self._bucket)
        return self._bucket

    def _zero_gaps(self, buffer: FullBuffer) -> None:
        """Only a guard looks at what belongs to no tensor."""
        if self._guard is not None:
            buffer.zero_gaps()

    def _acquire_bucket(self, key: BufferKey) -> torch.Tensor:
        """Memory of a bucket, after waiting for the oldest reductions where a pool is full (I7)."""
        while not self._allocator.has_room(key) and self._drain_oldest():
            pass
        return self._allocator.acquire(key)

    def _zero_missing(self, buffer: FullBuffer) -> None:
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
        if "land" not in self._events.wanted:
            return
        self._events.publish(
            Event(
                kind="land",
                operation=operation,
                dtype=dtype_name(self._dtypes.main_grads),
                payload_bytes=own_bytes,
                group=self._communicator.role,
                group_size=self._communicator.size,
                bucket=self._name,
            )
        )
