"""When gradients are reduced: a fixed order, the same on every rank.

[Note: reduction order] Units reduce in the reverse of the order in which they first ran, and the
root bucket by bucket: an output head goes where its modules ran, all else comes last. Before the
first backward pass that reduces as it goes, ranks compare the order of units, once; where they have
seen different ones, reverse registration order is kept, the whole root last, and they compare again
before the next, some times. Where the root goes they compare one pass later: a head's weights may
be read in front of the units as well, so its gradients must have been complete in time. A unit that
is complete early waits for its predecessors; what no backward pass completed is zero-filled and
reduced in the same order at its end. Ranks that skip different parameters therefore still issue the
same collectives in the same order.

[Note: fused weight gradients] A kernel of a fused layer writes a weight's gradient into the memory
of `get_main_grad()`: over what is there where the parameter has `overwrite_main_grad` set, which is
where every microbatch is reduced, and on top of it elsewhere. It sets `grad_added_to_main_grad`,
which is there from the start, since Transformer Engine looks for it, and returns a tensor without
meaning as the gradient, so that autograd reports the parameter. Where a weight is tied, that tensor
has zeros (`zero_out_wgrad`): autograd adds what other modules return, and the sum is taken besides.
`main_grad`, which the layer sets on the parameter, is dropped: it would keep the bucket's memory.

At most one unit has reductions under way that hold memory; landing the oldest before starting
another bounds it and overlaps each reduction with the backward pass of the next unit.
Reductions in place are not waited for before the end of the backward pass.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.comm.rendezvous import OrderAgreement
from mfsdp_core.comm.usage import Usage, unused_by_all
from mfsdp_core.errors import LifecycleError
from mfsdp_core.runtime.gradient_buffers import GradientBuffers
from mfsdp_core.runtime.nan_guard import NanGuard
from mfsdp_core.runtime.units import Unit
from mfsdp_core.shard.tensor_parallel import local_gradient

#: How often ranks compare the order of their units, until all have seen the same.
_COMPARISONS = 4


class Reductions:
    """Accumulation and reduction of all units, and the cycle that they belong to.

    units: those of the model, and behind them one for each trainable bucket of the root, whose
    negative indices count from the end of the list. Without `usages` nobody asks, and what is
    unused has a gradient of zeros.
    """

    def __init__(
        self,
        units: list[Unit],
        *,
        overlap: bool,
        guard: NanGuard,
        agreement: OrderAgreement,
        usages: list[Usage],
    ) -> None:
        self.units = units
        self._of_root = [unit for unit in reversed(units) if unit.is_of_root]
        self._shown = {unit.place for unit in self._of_root if unit.shown_by}
        # What was complete in the last backward pass, in that order, until the order is settled.
        self._completed: list[int] = []
        self._agreement = agreement
        #: How often ranks may still compare the order of their units.
        self.comparisons_left = _COMPARISONS if overlap else 0
        self._follow(range(len(units) - len(self._of_root)))
        #: Whether every backward pass reduces, rather than the last one of a cycle.
        self.reduces_every_pass = False
        # Whether gradients may be zeros that `reset` has kept.
        self._keeps_zeros = False
        for _, buffers in self._each:
            buffers.drain_oldest = self._drain_oldest
            self.reduces_every_pass |= not buffers.holds_whole
        self._overlap, self._guard, self._usages = overlap, guard, usages
        # The unit that reduces next, by position; whether the backward pass may nest graphs.
        self._next, self._may_nest_graphs = len(self._order), False
        # Reductions along the inner axis under way: the unit if they hold memory, and whether the
        # outer stage follows. And the bucket whose outer stage is under way.
        self._flights: deque[tuple[Unit | None, GradientBuffers, bool]] = deque()
        self._outer: GradientBuffers | None = None
        self._used: set[int] = set()
        self._begin_cycle()
        #: How often reduced gradients have been handed over, by which optimizers know new ones.
        self.attachments = 0

    def _begin_cycle(self) -> None:
        self.backward_seen = False
        #: Whether a forward pass has built a graph from which no gradient has come yet.
        self.awaits_backward = False
        self.unfinished_passes = 0
        self._asked = True
        # Backward passes that have reached parameters in this cycle.
        self._passes = 0
        # Whether one is running, and whether one has raised after others whose gradients no
        # parameter shows: clearing parameters does not clear those.
        self._is_running = self._is_broken = False

    def compare(
        self, forward: Sequence[int], began: Mapping[int, int], modules: Sequence[int]
    ) -> bool:
        """Before a pass that reduces as it goes: reduce as units ran, if all ranks saw the same.

        Returns whether they did. began: when each unit, or module of the root, was first called;
        see `CallBook.began`. modules: the order of those at which weights are gathered.
        """
        order = list(forward)
        never = sys.maxsize
        completed = {index: at for at, index in enumerate(self._completed)}
        for index in sorted(self._shown & began.keys() & completed.keys(), key=began.__getitem__):
            earlier = [at for at, unit in enumerate(order) if began.get(unit, never) < began[index]]
            units = (order[at] for at in earlier if order[at] >= 0)
            if all(completed[index] < completed.get(unit, never) for unit in units):
                order.insert(max(earlier, default=-1) + 1, index)
        self.comparisons_left -= 1
        same = self._agreement.is_same([*order, *modules])
        if same:
            self._follow(order)
            if not self._shown or self.comparisons_left < _COMPARISONS - 1:
                self.comparisons_left = 0
        return same

    def _follow(self, forward: Sequence[int]) -> None:
        self._places = {index: at for at, index in enumerate(reversed(forward))}
        rest = [unit for unit in self._of_root if unit.place not in self._places]
        order = [*map(self.units.__getitem__, self._places), *rest]
        self._order = [unit for unit in order if unit.gradients]
        self._each = [(unit, buffers) for unit in self._order for buffers in unit.gradients]

    def is_placed(self, unit: Unit) -> bool:
        """Whether the recorded order has `unit`, rather than behind all others."""
        return unit.place in self._places

    @property
    def is_idle(self) -> bool:
        """Whether no buffer in the communication dtype is live."""
        return not any(b.is_moving or b.has_open_bucket for _, b in self._each)

    def begin_backward(self, *, may_nest_graphs: bool) -> None:
        """Every trainable parameter owes a gradient again.

        Raises:
            LifecycleError: a pass of this cycle has raised, and the cycle was not ended.
        """
        self.follow_removed()
        self._refuse_broken()
        self._is_running = True
        self.awaits_backward = False
        self._next = 0 if self._overlap else len(self._order)
        self._completed.clear()
        self._asked = False
        self._guard.microbatch = self._passes
        self._passes += 1
        self._may_nest_graphs = may_nest_graphs
        for unit in self._order:
            unit.missing.update(unit.trainable)

    def take(
        self, unit: Unit, buffers: GradientBuffers, index: int, raw: nn.Parameter, *, is_last: bool
    ) -> None:
        """Take the gradient that autograd has just finished for the raw parameter `index`.

        See [Note: fused weight gradients].
        """
        by_kernel = _take_marks(raw)
        if by_kernel:
            buffers.written(index)
        gradient = raw.grad
        if isinstance(gradient, DTensor):
            gradient = local_gradient(raw)
        if gradient is not None and (not by_kernel or getattr(raw, "zero_out_wgrad", False)):
            buffers.accumulate(index, gradient, is_last=is_last)
        raw.grad = None
        identity = id(raw)
        unit.missing.discard(identity)
        if self.comparisons_left and not unit.missing:
            self._completed.append(unit.place)
        self._used.add(identity)
        if not unit.missing and self._overlap:
            self.issue(is_last=is_last)

    def spare(self) -> None:
        """A backward pass has ended that wanted no gradients of parameters."""
        for _, buffers in self._each:
            for managed in buffers.parameters:
                _take_marks(managed.raw)

    def waits_for(self, unit: Unit) -> bool:
        """Whether the next reduction is that of `unit`, of which gradients are missing."""
        order = self._order
        return bool(unit.missing) and self._next < len(order) and order[self._next] is unit

    def issue(
        self, is_over: Callable[[Unit], bool] = lambda _unit: False, *, is_last: bool
    ) -> list[Unit]:
        """Reduce units as far as the order allows that get no more gradients in this pass.

        is_over: whether an incomplete unit is one of them. Missing gradients are zeros. Without
        this, a rank that leaves out a parameter would start none of the reductions behind it before
        its backward pass ends, and could wait for a gather from a rank that waits for one of those
        (see [Note: gather order]). is_last: what happens once per cycle, on either axis, is due
        now, unless the unit may get more gradients. Returns the units that were incomplete.
        """
        incomplete: list[Unit] = []
        while self._next < len(self._order):
            unit = self._order[self._next]
            if unit.missing:
                if not is_over(unit):
                    break
                unit.missing.clear()
                incomplete.append(unit)
            axes = unit.sync.axes
            is_due = is_last and axes == "both"
            is_due = is_due and not (unit.shares_parameters or self._may_nest_graphs)
            for buffers in unit.gradients if axes != "none" else ():
                if not buffers.holds_whole or (is_due and buffers.awaits_reduction):
                    self._start(unit, buffers, is_last=is_due)
            self._next += 1
        return incomplete

    def issue_ahead_of(self, unit: Unit, *, is_last: bool) -> None:
        """At the end of a backward pass: reduce what stands before `unit` in the order."""
        end = self._places[unit.place]
        self.issue(lambda other: self._places.get(other.place, end) < end, is_last=is_last)

    def end_backward(self, *, is_last: bool) -> None:
        """Reduce what this pass still owes, and land everything."""
        if not self._overlap:
            self._next = 0
        self.issue(lambda _unit: True, is_last=is_last and self._overlap)
        for unit, buffers in self._each:
            # A parameter reached again after its unit had reduced (nested backward passes).
            if buffers.has_open_bucket and unit.sync.axes != "none":
                self._start(unit, buffers, is_last=is_last and unit.sync.axes == "both")
        self._is_running, self.backward_seen = False, True
        if is_last:
            # Ranks on paths without nested graphs have reduced this before they ask.
            for unit, buffers in self._each if self._may_nest_graphs and self._overlap else ():
                is_whole = unit.sync.axes == "both" and not unit.shares_parameters
                if is_whole and buffers.awaits_reduction:
                    self._start(unit, buffers, is_last=True)
            self._ask()
        self.land_all()
        self.unfinished_passes += 1

    def _start(self, unit: Unit, buffers: GradientBuffers, *, is_last: bool) -> None:
        """Reduce one bucket of `unit`. is_last: the outer stage follows."""
        holder = None if buffers.reduces_in_place else unit
        while holder and any(other not in (None, unit) for other, _, _ in self._flights):
            self._drain_oldest()
        buffers.issue(is_last=is_last)
        self._flights.append((holder, buffers, is_last))

    def _start_outer(self, buffers: GradientBuffers) -> None:
        """Start the outer stage of a bucket whose inner one has landed."""
        if self._outer is not None:
            self._outer.land()
        buffers.issue_outer()
        self._outer = buffers

    def _drain_oldest(self) -> bool:
        """Land the oldest reduction, so that its bucket becomes free; False if there is none."""
        if not self._flights:
            return False
        _, buffers, is_last = self._flights.popleft()
        buffers.land()
        if is_last and buffers.awaits_outer and not buffers.has_open_bucket:
            self._start_outer(buffers)
        return True

    def land_all(self) -> None:
        """Wait for and land all reductions under way, those of the outer axis included."""
        while self._drain_oldest():
            pass
        if self._outer is not None:
            self._outer.land()
            self._outer = None

    def _refuse_broken(self) -> None:
        if self._is_broken:
            raise LifecycleError(
                "a backward pass raised, after others of this cycle whose gradients are kept until "
                "the last one. Expected model.zero_grad(), or zero_grad() of an optimizer that is "
                "sharded, before the next backward pass or step; found none."
            )

    def issue_rest(self) -> None:
        """Start every reduction that the cycle still owes.

        Raises:
            LifecycleError: a pass of this cycle has raised, and gave a part of its gradients.
        """
        if not self.backward_seen:
            return
        self._refuse_broken()
        self._ask()
        for unit, buffers in self._each:
            if buffers.awaits_reduction:
                self._start(unit, buffers, is_last=True)
            elif unit.sync.axes == "both" and buffers.awaits_outer and not buffers.is_moving:
                self._start_outer(buffers)

    def attach(self) -> None:
        """Hand the reduced gradients to the optimizer's parameters, if there were any."""
        self.unfinished_passes = 0
        if not self.backward_seen:
            return
        self._ask()
        unset = set().union(*(usage.unset for usage in self._usages))
        units = (unit for unit in self._order if unit.sync.axes == "both" or not unit.is_held_back)
        complete = [buffers for unit in units for buffers in unit.gradients]
        passes = self._passes
        attached = [buffers.attach(unset, self.read, passes=passes) for buffers in complete]
        self.attachments += any(attached)
        if unset and any(buffers.reads_at_once(unset) for buffers in complete):
            self.read()

    def read(self) -> None:
        """Attach the gradients of what this rank left out and another one used; the host waits."""
        unused = unused_by_all(self._usages)
        for _, buffers in self._each:
            buffers.attach_rest(unused)

    def reset(self, *, keeps_zeros: bool = False) -> None:
        """Begin a new cycle without gradients, or with zeros where there were some."""
        self.abandon()
        self._reset(keeps_zeros=keeps_zeros)

    def _reset(self, *, keeps_zeros: bool = False) -> None:
        self._keeps_zeros = keeps_zeros
        for _, buffers in self._each:
            buffers.reset(keeps_zeros=keeps_zeros)
        self._used.clear()
        self._begin_cycle()

    def abandon(self) -> None:
        """Drop what a backward pass that failed has left behind; what earlier ones gave stays."""
        self.land_all()
        deferred = self._has_deferred()
        for _, buffers in self._each if self._is_running else ():  # else they are of earlier ones
            buffers.abandon()
        if self._is_running and not self.backward_seen:
            self._reset(keeps_zeros=True)
        elif self._is_running:
            self._is_running = False
            self._is_broken = deferred or not self._attached()

    @property
    def shows_all(self) -> bool:
        """Whether parameters have all gradients, but for those that the user has removed."""
        return all(buffers.shows_all(self._used) for _, buffers in self._each)

    def scale(self, factor: float) -> None:
        """Multiply all reduced gradients, as they were left by whoever has had them."""
        for _, buffers in self._each:
            buffers.scale(factor)

    def follow_removed(self) -> None:
        """Gradients that the user has set to None begin anew, as they do with autograd."""
        if self._keeps_zeros:
            self._keeps_zeros = False
            for _, buffers in self._each:
                buffers.follow_zeros()
        attached = self._attached()
        is_over = bool(attached) and not any(buffers.holds_gradients for buffers in attached)
        if is_over and not self._has_deferred():
            self._reset()
        else:
            for buffers in attached:
                buffers.follow_changes(self._used)

    def _has_deferred(self) -> bool:
        """Whether gradients of earlier passes wait to be reduced."""
        return any(u.sync.axes == "none" and buffers.has_open_bucket for u, buffers in self._each)

    def _attached(self) -> list[GradientBuffers]:
        return [buffers for _, buffers in self._each if buffers.is_attached]

    def _ask(self) -> None:
        """Start to find out which parameters nobody used, once per state of the cycle."""
        if not self._asked:
            self._asked = True
            for usage in self._usages:
                usage.ask(self._used)


def _take_marks(raw: Any) -> bool:
    """Whether a kernel wrote the gradient of a parameter; it leaves no mark of it."""
    by_kernel: bool = getattr(raw, "grad_added_to_main_grad", False)
    if by_kernel:
        raw.grad_added_to_main_grad = False
        vars(raw).pop("main_grad", None)
    return by_kernel
