"""Shared run-time state of one model: where the current pass stands, and what each hook does.

Module hooks are `before_forward` and the like, in the order of a pass; the wrapper calls the
rest. Nothing here knows a strategy: buckets do what their placements say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable, forward_ad

from mfsdp_core.comm.symmetric import UserBuffers
from mfsdp_core.errors import LifecycleError
from mfsdp_core.events import Event, EventBus, UnitKind
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.runtime.call_tensors import (
    CallHooks,
    LeftTensors,
    differentiable,
    refuse_unfinished,
    refuse_weights,
    tensors_in,
)
from mfsdp_core.runtime.calls import (
    NO_BACKWARD,
    Call,
    CallBook,
    ForwardPass,
    current_backward,
    inside_backward,
    leaves_parameters_alone,
)
from mfsdp_core.runtime.gradient_buffers import GradientBuffers
from mfsdp_core.runtime.reductions import Reductions
from mfsdp_core.runtime.schedule import Schedule
from mfsdp_core.runtime.units import GatherPoint, Unit

#: The function of `torch.func` that runs, None outside of all.
_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_COPY = (
    "a copy of a sharded module was called. It holds shards, to average them, and does not "
    "compute. To evaluate an average = AveragedModel(model.module), load it into a sharded model: "
    "model.load_state_dict(average.state_dict(), strict=False)."
)
_TRANSFORMED = (
    "a {module} of a sharded model was called inside of a function of torch.func, such as grad, "
    "jvp or vmap, or of forward-mode differentiation. Its weights are gathered for plain tensors "
    "alone. Use torch.autograd.grad on what the model returns, and batches in place of vmap."
)
_GRAPH = (
    "a backward pass with create_graph=True, or inside of a function of torch.func, came to a "
    "sharded model. What it computes would read weights after they have been released. Leave "
    "create_graph out, or compute gradient penalties and forces with an unsharded model that has "
    "loaded export_state_dict(model)."
)
_CHANGED = (
    "backward() came to {unit}, whose weights have changed since the forward pass that it goes "
    "back through: by optimizer.step(), by load_state_dict() or in place. Its gradients would be "
    "of neither the old nor the new weights. Call backward() first, or run the forward pass again."
)


@dataclass(eq=False)
class BackwardPass:
    """A backward pass that runs, or none.

    graph: its number, or `NO_BACKWARD`. keeps_graph: whether another one may go through it.
    spares_parameters: whether it has left the gradients of all parameters alone so far. reached:
    the pass is done with every call that began after this number; None before it has come to one.
    forwards: the forward passes that it goes through. calls: those whose backward has begun and not
    ended.
    """

    graph: int = NO_BACKWARD
    keeps_graph: bool = False
    spares_parameters: bool = True
    reached: int | None = None
    forwards: list[ForwardPass] = field(default_factory=list)
    calls: list[CallHooks] = field(default_factory=list)

    def reach(self, index: int | None, call: Call | None) -> int:
        """A gradient has reached `call` of the unit; None: a call repeated by recomputation.

        Returns the number behind which the backward pass is done with every call that began there.
        """
        if call is not None:
            self.reached = call.number
            if call.forward not in self.forwards:
                call.forward.answered = False
                self.forwards.append(call.forward)
        elif index is not None:  # only where the passes have one call of it
            ends = [number for forward in self.forwards for number in forward.ended.get(index, ())]
            self.reached = ends[0] if len(ends) == 1 else self.reached
        return sys.maxsize if self.reached is None else self.reached


class ShardedContext:
    """What the hooks of a pass do, and the cycle it belongs to."""

    def __init__(
        self,
        root: Unit,
        units: list[Unit],
        schedule: Schedule,
        grads: Reductions,
        *,
        events: EventBus,
        auto_sync: bool,
        allocators: Allocators,
    ) -> None:
        self.root = root
        self.units = units
        self.schedule = schedule
        self.grads = grads
        self.events = events
        self.auto_sync = auto_sync
        self.marked_last = False
        self.allocators = allocators
        self.user_buffers: UserBuffers | None = None
        self.transports: dict[str, str] = {}
        self.calls = CallBook()
        self._root_goes = any(bucket.weights.comes_and_goes for bucket in root.buckets)
        self._forward_order = schedule.gathered["forward"]
        self._backward_order = schedule.gathered["backward"]
        self._sync_stack: list[bool] = []
        self._backward = BackwardPass()
        # Whether the forward pass of the root that runs builds a graph; None where none runs.
        self._builds_graph: bool | None = None

    @property
    def is_last_microbatch(self) -> bool:
        """Whether a backward pass now ends its cycle: innermost no_sync/sync, else what was set."""
        return self._sync_stack[-1] if self._sync_stack else self.auto_sync or self.marked_last

    @property
    def in_no_sync(self) -> bool:
        """Whether the innermost scope that nobody has left is one of `no_sync`."""
        return self._sync_stack[-1:] == [False]

    @contextmanager
    def marking_last(self, is_last: bool) -> Iterator[None]:
        """Scope of `no_sync` (False) and `sync` (True); leaving restores what held before."""
        self._sync_stack.append(is_last)
        try:
            yield
        finally:
            self._sync_stack.pop()

    def before_forward(self, point: GatherPoint, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is about to run: its weights become ready and visible.

        Raises:
            LifecycleError: it is a copy, or a function of `torch.func` or forward-mode
                differentiation runs.
        """
        if module is not point.module:
            raise LifecycleError(_COPY)
        if _transform() is not None or forward_ad._current_level >= 0:
            raise LifecycleError(_TRANSFORMED.format(module=type(module).__name__))
        unit, recomputing = point.unit, current_backward() != NO_BACKWARD
        if point.is_unit and "enter" in self.events.wanted:
            self._tell("enter", "recompute" if recomputing else "forward", unit)
        if recomputing:
            self._come_to_recomputation(unit)
        elif point.is_unit or not unit.open:
            self._open(point)
        self.schedule.start(point, "forward")
        if not recomputing:  # it would have run already, and nothing would release it (R7)
            self.schedule.ahead(point, "forward")
        self.schedule.show(point)
        began = 0 if recomputing else self.calls.count
        call = CallHooks(point, began, self.before_backward, self.after_backward)
        if torch.is_grad_enabled() and (recomputing or point in unit.open[-1:]):
            # Now, since the module may change its inputs in place.
            call.watch_inputs(differentiable((*args, *kwargs.values())))

    def after_forward(
        self,
        point: GatherPoint,
        left: LeftTensors,
        _module: nn.Module,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> None:
        """It has run; the unit's weights go with the unit, unless a backward pass is next.

        Its backward pass does not count as one of the unit for a module that the unit calls: it is
        a part of the unit's. Nobody knows who calls what is recomputed: there it counts if its end
        can be seen.
        """
        unit, recomputing = point.unit, current_backward() != NO_BACKWARD
        hooks, end = point.running, None
        point.running = hooks.around if hooks is not None else None
        if recomputing:
            counts = point.is_unit or bool(differentiable((args, kwargs)))
        else:
            counts = point in unit.open[-1:]
            end = self.calls.end_call(unit.index) if counts else self.calls.mark()
        refuse_unfinished(point, output)
        tensors = tensors_in(output)
        refuse_weights(point, tensors)
        if torch.is_grad_enabled():
            # From these a backward pass may come to the call.
            outputs = [tensor for tensor in tensors if tensor.requires_grad and not tensor.is_leaf]
            if not point.is_unit:
                self.schedule.escapes(point, tensors, hooked=bool(outputs))
            outputs += left.new()
            if counts:
                unit.has_backward = bool(outputs)
            if outputs and hooks is not None:
                hooks.watch_outputs(outputs, end, counts=counts)
        if point.is_unit and "leave" in self.events.wanted:
            self._tell("leave", "recompute" if recomputing else "forward", unit)
        if not recomputing:
            self.schedule.end_forward(point)
            if counts:
                self._close(unit)

    def end_recomputation(self, point: GatherPoint, *_of_hook: Any) -> None:
        """A module has run again inside a backward pass, which now needs its own payload of it."""
        if inside_backward():
            with torch.no_grad():
                self.schedule.issue(point.unit, "backward", point.buckets)
                self.schedule.show(point)

    def before_backward(self, call: CallHooks) -> None:
        """The first gradient has reached an output of a call.

        Raises:
            LifecycleError: the weights have changed since, or the pass builds a graph of itself.
        """
        if torch.is_grad_enabled() or _transform() is not None:
            raise LifecycleError(_GRAPH)
        point, unit = call.point, call.point.unit
        if unit is self.root and self._backward.graph not in {NO_BACKWARD, current_backward()}:
            # The root's hook never fires in a nested graph: the pass that was running has raised.
            self._abandon()
        if self._backward.graph == NO_BACKWARD:
            self._begin_backward()
        if point.is_unit and unit is not self.root and "enter" in self.events.wanted:
            self._tell("enter", "backward", unit)
        if call.epoch != unit.epoch:
            raise LifecycleError(_CHANGED.format(unit=unit.name or "the root"))
        backward = self._backward
        reached = backward.reach(unit.index, call.call)
        active, backward.calls = backward.calls, []
        for one in active:
            if one.began > reached:
                one.point.unit.active_backwards -= 1
                self._release_if_idle(one.point.unit)
            else:
                backward.calls += (one,)
        self._catch_up(unit)
        if call.counts:
            unit.active_backwards += 1
            backward.calls += (call,)
        self.schedule.start(point, "backward")
        self.schedule.show(point)
        self.schedule.ahead(point, "backward")

    def after_backward(self, call: CallHooks) -> None:
        """Gradients of all inputs of a call are complete."""
        unit = call.point.unit
        if "leave" in self.events.wanted:
            self._tell("leave", "backward", unit)
        if call in self._backward.calls:
            self._backward.calls.remove(call)
            unit.active_backwards -= 1
            if call.in_order or not unit.missing:
                self._release_if_idle(unit)

    def gradient_ready(
        self, unit: Unit, buffers: GradientBuffers, index: int, raw: nn.Parameter
    ) -> None:
        """Autograd has finished the gradient of one raw parameter."""
        if torch.is_grad_enabled() or _transform() is not None:
            raise LifecycleError(_GRAPH)
        if self._backward.graph == NO_BACKWARD:
            self._begin_backward()
        if self._backward.spares_parameters:
            self._begin_gradients()
        if not (unit.active_backwards or unit.is_of_root):
            self._refuse_unseen(unit)
        self.grads.take(unit, buffers, index, raw, is_last=self._reduces_last)
        if not unit.missing:
            self._release_if_idle(unit)

    def finish_gradients(self) -> None:
        """Issue every reduction the cycle still owes, wait for all, and attach the results."""
        self.recover()
        self.grads.issue_rest()
        self.grads.land_all()
        self.grads.attach()

    @property
    def _reduces_last(self) -> bool:
        """Whether a reduction that starts now may be the only one of its cycle.

        A nested graph is a part of the pass: the same parameters may receive gradients again from
        another part, so what can be reduced only once waits for the end of the whole.
        """
        return self.is_last_microbatch and current_backward() == self._backward.graph

    def _owes_nothing(self, unit: Unit) -> bool:
        """Whether a unit gets no more gradients, and this rank has gathered it.

        Other ranks reduce it after they have gathered it: reducing first could wait for a rank that
        waits for the gather.
        """
        if unit.is_of_root:
            is_due = self.grads.is_placed(unit)
        else:
            is_due = unit.index in self._backward_order.gathered or not unit.has_backward
        return is_due and self.calls.is_over(unit.index, self._backward.reached)

    def _catch_up(self, unit: Unit) -> None:
        """Before a backward pass goes on with `unit`: reduce and gather what comes before it."""
        if not self.grads.waits_for(unit):  # which is not over: the pass has come to it
            self._reduce_what_is_over()
        if unit.index is None:
            return
        if unit.index in self._backward_order.gathered:
            self.schedule.agree(unit, "backward")
        else:
            self._join_collectives_before(unit.index)

    def _reduce_what_is_over(self) -> None:
        """Reduce, in order, units that get no more gradients, and release those left open."""
        backward = self._backward
        for unit in self.grads.issue(self._owes_nothing, is_last=self._reduces_last):
            backward.calls = [call for call in backward.calls if call.point.unit is not unit]
            unit.active_backwards = 0
            self._release_if_idle(unit)

    def _open(self, point: GatherPoint) -> None:
        """A call of a unit begins, outside of a backward pass."""
        unit, index = point.unit, point.unit.index
        if unit is self.root:
            self._begin_pass()
        elif self._builds_graph is None:
            self.schedule.follow_changes()
        if not unit.open:
            unit.check_held()
        unit.open.append(point)
        if self._builds_graph and not torch.is_grad_enabled():
            self.calls.expect_nested_graphs()
        if index is None:
            return
        self.schedule.order.observe(index)
        if torch.is_grad_enabled() or self.calls.is_counting:
            self.calls.begin_call(index)
        if self._builds_graph is not None and index in self._forward_order.gathered:
            self.schedule.agree(unit, "forward")
        else:
            self.schedule.enter(index)

    def _close(self, unit: Unit) -> None:
        """It has ended."""
        unit.open.pop()
        if unit.index is None:
            self.grads.awaits_backward |= bool(self._builds_graph)
            self._builds_graph = None
            self.schedule.end_pass()
        else:
            self.schedule.order.observe_end(unit.index)
        if "forward" not in unit.stays:
            self.schedule.release(unit)
            unit.show_sharded()

    def _come_to_recomputation(self, unit: Unit) -> None:
        """A unit is about to be gathered for its module's `forward`, inside a backward pass."""
        if unit.index is None:
            return
        gathered = unit.index in self._backward_order.gathered
        if not gathered or unit.around:
            with torch.no_grad():
                self._join_collectives_before(unit.index)
        if gathered and not unit.shows_raw:
            self.schedule.agree(unit, "backward")

    def _join_collectives_before(self, index: int) -> None:
        """In a backward pass: take part in gathers that other ranks make before that of `index`.

        The unit around another one comes first, whichever hook of a tensor runs first.
        """
        for outer in self.units[index].around:
            if outer.index is not None and outer.index not in self._backward_order.gathered:
                self._join_collectives_before(outer.index)
                self.schedule.gather_rest()
                self.schedule.issue(outer, "backward", self.schedule.buckets(outer, "backward"))
        for skipped in self._backward_order.missing_before(index):
            unit = self.units[skipped]
            if unit.has_backward and self.calls.is_over(skipped, self._backward.reached):
                self._backward_order.gathered.add(skipped)
                self.schedule.join(unit, "backward")
                self._reduce_what_is_over()
        self._backward_order.gathered.add(index)

    def _join_remaining_collectives(self) -> None:
        """At the end of a backward pass: as above, for units that this rank never came to."""
        if not any(forward.is_whole for forward in self._backward.forwards):
            return
        is_last = self.is_last_microbatch
        for skipped in self._backward_order.missing_before(None):
            unit = self.units[skipped]
            if unit.has_backward:
                self.grads.issue_ahead_of(unit, is_last=is_last)
                self.schedule.join(unit, "backward")

    def _release_if_idle(self, unit: Unit) -> None:
        """Free the weights of a unit unless a call of it is running, forward or backward.

        A call is over once autograd comes to what is older than all of it (see [Note: call
        numbers]). Where it has inputs that nothing computed, nobody sees that: complete gradients
        of them leave out what is computed from weights alone (a product of two, say), complete
        gradients of weights leave out those of inputs through frozen weights. There both are
        needed. Otherwise the end of the pass frees them. Another call of the unit gathers again.
        """
        is_busy = unit.active_backwards or unit.open or "backward" in unit.stays
        if not (unit.is_of_root or is_busy):
            if self.schedule.partial is not None:
                self.schedule.gather_rest(unit)
            self.schedule.release(unit)
            unit.show_sharded()

    def begin_cycle(self, *, keeps_zeros: bool = False) -> None:
        """Forget the gradients of the cycle that ends here; keeps_zeros: leave zeros."""
        self.recover()
        self.grads.reset(keeps_zeros=keeps_zeros)

    def _begin_pass(self) -> None:
        if torch.jit._trace.is_tracing() or torch.compiler.is_exporting():
            raise LifecycleError(
                "torch.jit.trace, torch.export or torch.onnx records a forward pass of a sharded "
                "model, whose weights are whole only while a unit runs; expected a module that is "
                "not sharded. Export one of its class that has loaded export_state_dict(model)."
            )
        self.recover()
        for unit in (self.root, *self.units):
            unit.open.clear()
        self.schedule.follow_changes()
        self._builds_graph = torch.is_grad_enabled()
        self.schedule.begin_pass()
        if self._builds_graph:
            self.calls.begin_pass()

    def _begin_backward(self) -> None:
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        self._backward = BackwardPass(current_backward(), keeps_graph)
        if not leaves_parameters_alone():
            self._begin_gradients()
        if self._builds_graph is None:
            with torch.no_grad():
                self.schedule.follow_changes()
                if self._root_goes:
                    # Autograd may come to what it holds before it comes to what it returned.
                    self.schedule.issue(self.root, "backward")
                    self.schedule.wait([self.root])
            self._backward_order.begin()
        Variable._execution_engine.queue_callback(self._end_backward)

    def _begin_gradients(self) -> None:
        self._backward.spares_parameters = False
        grads = self.grads
        if grads.comparisons_left and (grads.reduces_every_pass or self.is_last_microbatch):
            schedule, units = self.schedule, self.schedule.order.sequence("forward")
            schedule.is_agreed |= grads.compare(units, self.calls.began, schedule.seen)
        grads.begin_backward(may_nest_graphs=self.calls.may_nest_graphs)

    def _refuse_unseen(self, unit: Unit) -> None:
        """A gradient must not have come by a way on which nobody gathers the weights it needs."""
        if unit.index in self._backward_order.gathered or self._builds_graph is not None:
            return
        if any(bucket.weights.comes_and_goes for bucket in unit.buckets):
            raise LifecycleError(
                f"unit {unit.name} got a gradient through a tensor that its call has neither "
                "returned nor left on one of its modules; without the unit's weights, which are "
                "gathered when a gradient reaches what the call returned. Return that tensor."
            )

    def _tell(self, kind: UnitKind, operation: str, unit: Unit) -> None:
        self.events.publish(Event(kind, operation, "", 0, "", 1, unit.name))

    def _end_backward(self) -> None:
        if "leave" in self.events.wanted:
            self._tell("leave", "backward", self.root)
        with torch.no_grad():
            self.schedule.gather_rest()
            self._join_remaining_collectives()
            if self._backward.spares_parameters:
                self.grads.spare()
                self._settle()
                return
            self.grads.end_backward(is_last=self.is_last_microbatch)
            self._settle()
            if self.is_last_microbatch:
                self.finish_gradients()

    def _settle(self) -> None:
        """Back to rest: nothing running, shards visible, only persistent weights materialised.

        Apart from a forward pass that goes on, having taken a gradient for its own use.
        """
        for forward in self._backward.forwards:
            forward.answered = not self._backward.keeps_graph
        self._backward = BackwardPass()
        self._backward_order.end()
        for point in self.schedule.points:
            if not point.unit.open:
                point.running = None  # a checkpoint leaves a call by raising, once it has enough
        for unit in (self.root, *self.units):
            unit.active_backwards = 0
            unit.missing.clear()
            if not unit.open and "backward" not in unit.stays:
                self.schedule.release(unit)
                if unit.shows_raw:
                    unit.show_sharded()

    @torch.no_grad()
    def recover(self) -> None:
        """Drop what a pass that ended with an exception has left under way, if one has.

        Does nothing while autograd runs: activations are recomputed inside a pass.
        """
        is_left = any(map(attrgetter("open"), self.units))  # a unit that ran on its own has raised
        runs = self._builds_graph is not None or self._backward.graph != NO_BACKWARD
        failed = runs or is_left
        if failed and not inside_backward():
            self._abandon()

    @torch.no_grad()
    def _abandon(self) -> None:
        self.grads.abandon()
        self.calls.abandon_pass()
        self.schedule.gather_rest(forget=True)
        self._forward_order.end()
        self._builds_graph = None
        for unit in (self.root, *self.units):
            unit.open.clear()
        self._settle()
