"""Where the runtime is called from: module hooks, tensor hooks and parameter hooks.

module forward pre-hook      -> before_forward
module forward hook          -> after_forward, and hooks on the tensors of this call:
gradient of any output       -> before_backward (also of tensors that it leaves on its module)
gradients of all inputs      -> after_backward (never, where no input requires a gradient: the
                                end of the backward pass releases the unit then)
module forward hook, always  -> end_recomputation, where passes read different payloads
post-accumulate-grad hook    -> gradient_ready, once per backward pass and parameter, also for
                                tied parameters and modules called several times
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.weak import WeakTensorKeyDictionary

from mfsdp_core.errors import CapabilityNotBuiltError, LifecycleError
from mfsdp_core.runtime.bucket import Bucket
from mfsdp_core.runtime.call_tensors import (
    LeftTensors,
    differentiable,
    refuse_unfinished,
    refuse_weights,
    tensors_in,
)
from mfsdp_core.runtime.calls import NO_BACKWARD, Call, current_backward, inside_backward
from mfsdp_core.runtime.context import ShardedContext
from mfsdp_core.runtime.units import GatherPoint, Unit, is_called

#: What compiles the frames that this thread enters; None where nothing does.
_compiler: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback
_COPY = (
    "a copy of a sharded module was called. It holds shards, to average them, and does not "
    "compute. To evaluate an average = AveragedModel(model.module), load it into a sharded model: "
    "model.load_state_dict(average.state_dict(), strict=False)."
)


class CallHooks:
    """The hooks on the tensors of one call of the module of `point`.

    around: the call that was running when this one began, of the same point.
    """

    __slots__ = (
        *("__weakref__", "_began", "_call", "_context", "_counts", "_epoch", "_graph", "_in_order"),
        *("_owed", "_parts", "around", "point"),
    )

    def __init__(self, context: ShardedContext, point: GatherPoint) -> None:
        self.point = point
        self.around: CallHooks | None = point.running
        point.running = self
        self._context = context
        self._began = context.began
        self._graph = NO_BACKWARD
        self._parts = self._owed = 0
        self._in_order = False

    def watch_inputs(self, tensors: Sequence[torch.Tensor], leaves: LeafInputs) -> None:
        """Tell the context when the gradients of all `tensors` are complete."""
        inner = [tensor for tensor in tensors if not tensor.is_leaf]
        if len(inner) == 1:
            inner[0].register_hook(self.left)
        elif inner:
            register_multi_grad_hook(inner, self.left, mode="all")
        self._parts = bool(inner)
        self._in_order = len(inner) == len(tensors)
        if not self._in_order:
            own = {id(tensor): tensor for tensor in tensors if tensor.is_leaf}
            self._parts += len(own)
            for tensor in own.values():
                leaves.watch(tensor, self)

    def watch_outputs(
        self, tensors: Iterable[torch.Tensor], call: Call | None, *, counts: bool
    ) -> None:
        """Tell the context when the first gradient of `tensors` arrives."""
        self._call = call
        self._counts = counts
        self._epoch = self.point.unit.epoch
        for tensor in tensors:
            tensor.register_hook(self._entered)

    def _entered(self, _gradient: torch.Tensor) -> None:
        graph = current_backward()
        if graph != self._graph:
            self._graph = graph
            self._owed = self._parts
            self._context.before_backward(
                self.point, self._call, self._began, counts=self._counts, epoch=self._epoch
            )

    def left(self, _gradients: object) -> None:
        """One part of the inputs has its gradient: the inner tensors together, or a leaf.

        A leaf's may come from other calls alone. Of a backward pass that has not come in by the
        outputs, nothing is over before its end.
        """
        if self._graph != current_backward():
            return
        if self._owed > 1:
            self._owed -= 1
        else:
            self._context.after_backward(self.point.unit, self._began, in_order=self._in_order)


class LeafInputs:
    """Leaf tensors that calls were given: one hook each, however many calls there are.

    A leaf may live long. Hooks of every call would live as long as it does, with their graphs.
    """

    def __init__(self) -> None:
        self._calls: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def watch(self, leaf: torch.Tensor, call: CallHooks) -> None:
        """Tell `call` when the gradient of `leaf` is complete, as long as its graph lives."""
        calls: weakref.WeakSet[CallHooks] | None = self._calls.get(leaf)
        if calls is None:
            calls = self._calls[leaf] = weakref.WeakSet()
            leaf.register_hook(partial(_tell, weakref.ref(calls)))
        calls.add(call)


def _tell(calls: weakref.ref[weakref.WeakSet[CallHooks]], gradient: torch.Tensor) -> None:
    for call in list(calls() or ()):
        call.left(gradient)


def attach_hooks(context: ShardedContext) -> None:
    """Hook every module at which `context` gathers, and the parameters of every unit."""
    leaves = LeafInputs()
    for point in context.schedule.points:
        _hook_module(context, point, leaves)
    for unit in context.grads.units:
        _hook_parameters(context, unit)
    _hook_modules_of_root(context)
    _hook_ways_in(context)
    _hook_two_payloads(context)


def _hook_module(context: ShardedContext, point: GatherPoint, leaves: LeafInputs) -> None:
    unit, left = point.unit, LeftTensors(point)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is not point.module:
            raise LifecycleError(_COPY)
        counts = context.before_forward(point)
        hooks = CallHooks(context, point)
        if counts and torch.is_grad_enabled():
            # Now, since the module may change its inputs in place.
            hooks.watch_inputs(differentiable((*args, *kwargs.values())), leaves)

    def after(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        hooks = point.running
        point.running = hooks.around if hooks is not None else None
        has_inputs = point.is_unit or bool(differentiable((args, kwargs)))
        counts, call = context.end_call(point, has_inputs=has_inputs)
        refuse_unfinished(point, output)
        tensors = tensors_in(output)
        refuse_weights(point, tensors)
        if torch.is_grad_enabled():
            outputs = made(tensors)
            if counts:
                unit.has_backward = bool(outputs)
            if outputs and hooks is not None:
                hooks.watch_outputs(outputs, call, counts=counts)
        context.after_forward(point)

    def made(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors from which a backward pass may come to the call that has ended."""
        outputs = [tensor for tensor in tensors if tensor.requires_grad and not tensor.is_leaf]
        if not point.is_unit:
            context.schedule.escapes(point, tensors, hooked=bool(outputs))
        return outputs + left.new()

    # torch.compile traces through hooks, and would replay what they did once (gathers, ledger
    # entries). Disabled, they break the graph: what lies between them is compiled.
    point.module.register_forward_pre_hook(_untraced(before), prepend=True, with_kwargs=True)
    point.module.register_forward_hook(_untraced(after), with_kwargs=True)


def _hook_ways_in(context: ShardedContext) -> None:
    """Modules around units that may be called past the root, as by `generate` of an adapter.

    Without gradients such a call is one of the root, whose weights are read in it.
    """
    root = next(p for p in context.schedule.points if p.is_unit and p.unit is context.root)
    units = {id(unit.module) for unit in context.units}

    def before(module: nn.Module, _args: Any) -> None:
        if not (root.unit.open or torch.is_grad_enabled() or inside_backward()):
            context.before_forward(root)
            opened.append(module)

    def after(module: nn.Module, _args: Any, _output: Any) -> None:
        if opened[-1:] == [module]:
            context.end_call(root, has_inputs=False)
            context.after_forward(root)

    def ended(module: nn.Module, _args: Any, _output: Any) -> None:
        if opened[-1:] == [module]:
            opened.pop()

    opened: list[nn.Module] = []
    for module in _around_units(root.module, units) if root.unit.buckets else ():
        module.register_forward_pre_hook(_untraced(before), prepend=True)
        module.register_forward_hook(_untraced(after))
        module.register_forward_hook(_untraced(ended), always_call=True)


def _around_units(module: nn.Module, units: set[int]) -> Iterator[nn.Module]:
    """Modules below `module` that have units inside, and are called."""
    for child in module.children():
        if id(child) not in units:
            yield from _around_units(child, units)
            if is_called(child) and any(id(one) in units for one in child.modules()):
                yield child


def _hook_two_payloads(context: ShardedContext) -> None:
    """See [Note: two payloads] of `runtime/weight_buffers.py`."""
    points = context.schedule.points
    seen = {id(point.module) for point in points}
    for point in points:
        buckets = [bucket for bucket in point.buckets if bucket.weights.has_two_payloads]
        if not buckets:
            continue

        def ended(_module: nn.Module, _args: Any, _output: Any, point: GatherPoint = point) -> None:
            context.end_recomputation(point)

        # Recomputation may be stopped, by an exception, once it has saved what is wanted.
        point.module.register_forward_hook(_untraced(ended), always_call=True)
        for bucket in buckets:
            holders = {id(m): m for p in bucket.parameters for m, _ in p.holders}
            for holder in (m for key, m in holders.items() if key not in seen):
                holder.register_forward_pre_hook(_untraced(partial(_refuse_inner, bucket)))


def _refuse_inner(bucket: Bucket, module: nn.Module, _args: Any) -> None:
    """Recomputation inside of a unit must not read what a backward pass reads.

    Raises:
        CapabilityNotBuiltError: it would.
    """
    if inside_backward() and bucket.weights.is_for_backward:
        raise CapabilityNotBuiltError(
            f"activations of a {type(module).__name__} in {bucket.plan.name} are recomputed, and "
            "those of its whole unit are not. The weight_codec has one payload for forward passes "
            "and another for backward passes. Pass enable_fine_grained_param_gather=True, "
            "recompute the whole unit, or make that module a unit."
        )


def _hook_parameters(context: ShardedContext, unit: Unit) -> None:
    """Parameter hooks hold their targets weakly.

    Python's collector cannot see into them, so a strong reference would keep the model for ever.
    """
    model = weakref.ref(context)
    place = unit.place
    for number, bucket in enumerate(
        bucket for bucket in unit.buckets if bucket.gradients is not None
    ):
        for index, managed in enumerate(bucket.parameters):

            def ready(raw: torch.Tensor, index: int = index, number: int = number) -> None:
                alive = model()
                if alive is not None:
                    unit = alive.grads.units[place]
                    alive.gradient_ready(unit, unit.gradients[number], index, raw)  # type: ignore[arg-type]

            managed.raw.register_post_accumulate_grad_hook(ready)


def _hook_modules_of_root(context: ShardedContext) -> None:
    """Know when modules begin that show when a bucket of the root is used.

    Not in what torch.compile traces, which would break its graph.
    """
    calls = context.calls
    for unit in context.grads.units[len(context.units) :]:
        for module in unit.shown_by:

            def begins(_module: nn.Module, _args: Any, index: int = unit.place) -> None:
                if not torch.compiler.is_compiling():
                    calls.begin_in_root(index)

            module.register_forward_pre_hook(begins)


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """`hook` itself while nothing is compiled: torch's wrapper costs as much as the hook."""
    disabled: Callable[..., None] = torch.compiler.disable(hook)

    def run(*arguments: Any) -> None:
        if _compiler() is None:
            hook(*arguments)
        else:
            disabled(*arguments)

    untraced: Callable[..., None] = torch._dynamo.decorators.skip(run)
    return untraced
