"""The hooks on the tensors of one call: where a backward pass enters it, and where it leaves.

[Note: gradients of gradients] A backward pass that builds a graph of itself (`create_graph`) leaves
operations behind that read the weights again, outside of any module's `forward`. Whatever leaves or
enters such a part of the graph is a gradient of one of the call's own tensors, of some order. Each
of them is hooked in its turn, so that the unit's weights are gathered before a later backward pass
goes through that part, from whichever side it comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.weak import WeakTensorKeyDictionary

from mfsdp_core.runtime.calls import Call
from mfsdp_core.runtime.context import ShardedContext
from mfsdp_core.runtime.gathering import GatherPoint
from mfsdp_core.runtime.transforms import levels, with_graphs


class CallHooks:
    """One call of the module of `point`, from before its `forward` on.

    around: the call that was running when this one began, of the same point.
    """

    __slots__ = (
        *("__weakref__", "_call", "_context", "_counts", "_epoch", "_graph", "_owed", "_parts"),
        *("around", "point"),
    )

    def __init__(self, context: ShardedContext, point: GatherPoint) -> None:
        self.point = point
        self.around: CallHooks | None = point.running
        point.running = self
        self._context = context
        self._graph = -1
        self._parts = self._owed = 0

    def watch_inputs(self, tensors: Sequence[torch.Tensor], leaves: LeafInputs) -> None:
        """Tell the context when the gradients of all `tensors` are complete."""
        inner = [tensor for tensor in tensors if not tensor.is_leaf]
        if len(inner) == 1:
            inner[0].register_hook(self._left_one)
        elif inner:
            register_multi_grad_hook(inner, self._left, mode="all")
        self._parts = bool(inner)
        if len(inner) < len(tensors):
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

    def _entered(self, gradient: torch.Tensor) -> torch.Tensor | None:
        graph = torch._C._current_graph_task_id()
        if graph != self._graph:
            self._graph = graph
            self._owed = self._parts
            self._context.before_backward(
                self.point, self._call, counts=self._counts, epoch=self._epoch
            )
        if torch.is_grad_enabled():
            return follow(self._context, self.point, gradient)
        return None

    def _left_one(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self.one_left()
        if torch.is_grad_enabled():
            return follow(self._context, self.point, gradient)
        return None

    def _left(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self.one_left()
        if torch.is_grad_enabled():
            for gradient in gradients:
                if gradient is not None:
                    follow(self._context, self.point, gradient)

    def leaf_left(self, gradient: torch.Tensor) -> None:
        """The gradient of an input that is a leaf is complete, maybe by other calls alone."""
        if self._graph == torch._C._current_graph_task_id():
            self._left_one(gradient)

    def one_left(self) -> None:
        """One part of the inputs has its gradient: the inner tensors together, or a leaf.

        Of a backward pass that has not come in by the outputs, nothing is over before its end.
        """
        if self._graph != torch._C._current_graph_task_id():
            return
        if self._owed > 1:
            self._owed -= 1
        else:
            self._context.after_backward(self.point.unit)


class LeafInputs:
    """Leaf tensors that calls were given: one hook each, however many calls there are.

    A leaf lives as long as its owner likes, and so would hooks of every call, with their graphs.
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
        call.leaf_left(gradient)


def follow(
    context: ShardedContext, point: GatherPoint, gradient: torch.Tensor
) -> torch.Tensor | None:
    """Hook a gradient that has a graph, see [Note: gradients of gradients].

    Returns what is to take its place: a leaf must not gather hooks.
    """
    for inner in with_graphs(levels(gradient)[1:2]):
        inner.register_hook(partial(_again, context, point))
    if not gradient.requires_grad:
        return None
    if gradient.is_leaf:
        gradient = gradient.view_as(gradient)
    gradient.register_hook(partial(_again, context, point))
    return gradient


def _again(
    context: ShardedContext, point: GatherPoint, gradient: torch.Tensor
) -> torch.Tensor | None:
    context.before_backward_again(point)
    return follow(context, point, gradient) if torch.is_grad_enabled() else None
