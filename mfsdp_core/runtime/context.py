"""Shared run-time state of one model: where the current pass stands, and what each moment does.

The hooks of `hooks.py` call the moments (`before_forward` ...); the wrapper of `api.py` calls the
rest. Nothing here knows a strategy: buckets do what their placements say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd import Variable

from mfsdp_core.events import EventBus
from mfsdp_core.runtime.grad_pipeline import GradPipeline
from mfsdp_core.runtime.gradient_buffers import GradientBuffers
from mfsdp_core.runtime.param_pipeline import ParamPipeline
from mfsdp_core.runtime.units import Unit


def inside_backward() -> bool:
    """Whether autograd is running a graph now, as it is while activations are recomputed.

    A flag set by a module's backward hook would not do: with reentrant checkpointing the recomputed
    forward runs before that hook.
    """
    return bool(torch._C._current_graph_task_id() != -1)


class ShardedContext:
    """The moments of a pass and the cycle they belong to."""

    def __init__(
        self,
        root: Unit,
        units: list[Unit],
        params: ParamPipeline,
        grads: GradPipeline,
        *,
        events: EventBus,
        auto_sync: bool,
    ) -> None:
        self.root = root
        self.units = units
        self.params = params
        self.grads = grads
        self.events = events
        self.auto_sync = auto_sync
        self._sync_stack: list[bool] = []
        self._backward_running = False
        self._forward_running = False
        self._gather_ahead_of: Unit | None = None

    @property
    def is_last_microbatch(self) -> bool:
        """Whether a backward pass now ends its cycle: innermost no_sync/sync, else auto-sync."""
        return self._sync_stack[-1] if self._sync_stack else self.auto_sync

    @contextmanager
    def marking_last(self, is_last: bool) -> Iterator[None]:
        """Scope of `no_sync` (False) and `sync` (True); leaving restores what held before."""
        self._sync_stack.append(is_last)
        try:
            yield
        finally:
            self._sync_stack.pop()

    def before_forward(self, unit: Unit) -> None:
        """`unit` is about to run: its weights become ready and visible."""
        recomputing = inside_backward()
        if unit is self.root and not recomputing:
            self._begin_pass()
        self.params.issue(unit)
        if not recomputing:
            # Never while recomputing: the unit gathered ahead would have run already, and nothing
            # would release it again (R7).
            if unit.place is not None:
                self.params.order.observe(unit.place)
            self.params.prefetch(unit, "forward")
        self.params.ready(unit)
        unit.show_raw()

    def after_forward(self, unit: Unit) -> None:
        """`unit` has run; its weights go, unless a backward pass is about to use them."""
        if inside_backward():
            return
        if unit is self.root:
            self._forward_running = False
            self.params.order.finish_pass()
            self.params.release_all()
        else:
            self.params.release(unit)
        unit.show_sharded()

    def before_backward(self, unit: Unit) -> None:
        """The first gradient has reached an output of `unit`."""
        self._begin_backward()
        unit.active_backwards += 1
        self.params.ready(unit)
        unit.show_raw()
        # The unit that ran before, in backward order, has not been released yet: autograd calls
        # after_backward for it next, from a hook on the same tensor. Gathering ahead now would hold
        # three units at once.
        self._gather_ahead_of = unit

    def after_backward(self, unit: Unit) -> None:
        """Gradients of all inputs of one call of `unit` are complete."""
        unit.active_backwards -= 1
        if unit.active_backwards <= 0 and unit is not self.root:
            unit.active_backwards = 0
            self.params.release(unit)
            unit.show_sharded()
        self._gather_ahead()

    @torch.no_grad()
    def gradient_ready(
        self, unit: Unit, buffers: GradientBuffers, index: int, raw: nn.Parameter
    ) -> None:
        """Autograd has finished the gradient of one raw parameter."""
        self._begin_backward()
        self._gather_ahead()
        self.grads.take(unit, buffers, index, raw, is_last=self.is_last_microbatch)

    def finish_gradients(self) -> None:
        """Issue every reduction the cycle still owes, wait for all, and attach the results."""
        self.grads.issue_rest()
        self.grads.land_all()
        self.grads.attach()

    def _gather_ahead(self) -> None:
        """Start the gathers of the unit that follows in backward order, once."""
        unit, self._gather_ahead_of = self._gather_ahead_of, None
        if unit is not None:
            self.params.prefetch(unit, "backward")

    def _begin_pass(self) -> None:
        if self._forward_running or self._backward_running:
            self._recover()
        self._forward_running = True

    def _begin_backward(self) -> None:
        if not self._backward_running:
            self._backward_running = True
            self.grads.begin_backward()
            engine = Variable._execution_engine
            engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        with torch.no_grad():
            self.grads.end_backward(is_last=self.is_last_microbatch)
            self._settle()
            if self.is_last_microbatch:
                self.finish_gradients()

    def _settle(self) -> None:
        """Back to rest: nothing running, shards visible, only persistent weights materialised."""
        self._backward_running = False
        self._forward_running = False
        self._gather_ahead_of = None
        self.params.release_all()
        for unit in (self.root, *self.units):
            unit.active_backwards = 0
            unit.show_sharded()

    def _recover(self) -> None:
        """A pass ended with an exception; drop what it left under way."""
        with torch.no_grad():
            self.grads.abandon()
            self._settle()
