"""The differentiable tensors that a call was given, has returned, or has left on its module.

Hooks on them tell when a backward pass enters and leaves the call, so none may be missed. Looked
through are containers, mappings, dataclasses, whatever pytree knows, and the attributes of any
other object, as `torch.distributions.Normal` has them.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import SUPPORTED_NODES

from mfsdp_core.errors import LifecycleError
from mfsdp_core.runtime.calls import NO_BACKWARD, Call, current_backward
from mfsdp_core.runtime.units import GatherPoint

#: What holds no tensor, or only tensors that no call has made.
_CLOSED = (
    *(int, float, complex, str, bytes, bytearray, range, slice, type, types.ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.Generator, weakref.ref, nn.Module),
)
_UNFINISHED = (Iterator, types.CoroutineType, types.AsyncGeneratorType)
_ITEMS = (list, tuple, set, frozenset)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Tensors anywhere in `tree`, parameters too, each as often as it occurs."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    _collect(tree, found, None)
    return found


def differentiable(tree: Any) -> list[torch.Tensor]:
    """Those of `tensors_in` that require a gradient.

    Parameters are left out: they outlive the pass, and hooks on them would pile up.
    """
    return [
        tensor
        for tensor in tensors_in(tree)
        if tensor.requires_grad and not (tensor.is_leaf and isinstance(tensor, nn.Parameter))
    ]


def _collect(value: Any, found: list[torch.Tensor], seen: set[int] | None) -> None:
    """seen: ids of the objects that are being looked through, None before the first one."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif type(value) in _ITEMS:
        for item in value:
            if isinstance(item, torch.Tensor):
                found.append(item)
            else:
                _collect(item, found, seen)
    elif type(value) is dict:
        for item in value.values():
            _collect(item, found, seen)
    elif value is not None and not isinstance(value, _CLOSED):  # which takes Python code of torch's
        seen = set() if seen is None else seen
        if id(value) not in seen:
            seen.add(id(value))
            for item in _parts(value):
                _collect(item, found, seen)


def _parts(value: Any) -> Iterator[Any]:
    """What an object of no plain kind holds."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (*_ITEMS, deque)):
        yield from value
    elif (node := SUPPORTED_NODES.get(type(value))) is not None:
        yield from node.flatten_fn(value)[0]
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _closure(value)
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)


def _closure(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue


def refuse_unfinished(point: GatherPoint, output: Any) -> None:
    """Refuse a call of a unit that has not computed what it returned.

    Raises:
        LifecycleError: a generator, a coroutine or another iterator, at the top of the output.
    """
    if point.is_unit and not isinstance(output, torch.Tensor) and isinstance(output, _UNFINISHED):
        raise LifecycleError(
            f"{type(point.module).__name__} returned a {type(output).__name__}, which computes "
            "after the call, when the weights of a sharded module are gone; expected finished "
            "tensors. Return a list or a tuple of them."
        )


def refuse_weights(point: GatherPoint, outputs: list[torch.Tensor]) -> None:
    """Refuse a call of a unit that has returned its weights: their memory goes with the call.

    The root's weights stay until the end of the pass.

    Raises:
        LifecycleError: a parameter, a view of it, or what else shares its memory.
    """
    if point.is_unit and point.unit.index is not None and point.has_returned_weights(outputs):
        raise LifecycleError(
            f"{type(point.module).__name__} returned its own weights, or a view of them, and "
            "their memory is released after the call of a sharded module; expected results of "
            "their own memory. Compute with the weights inside of the module, return a clone() of "
            "them, or leave the module out of fsdp_unit_modules."
        )


class LeftTensors:
    """Tensors that the calls of a unit leave on its modules, such as a router's loss.

    The root's weights stay until the end of the pass, so that what it leaves needs no hook. Where
    such tensors are is looked for in calls 1, 2, 4, 8 and so on, and remembered.
    """

    def __init__(self, point: GatherPoint) -> None:
        self._module = point.module
        self._calls = 0
        self._search_at = 1 if point.is_unit and point.unit.index is not None else 0
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._before: list[weakref.ref[torch.Tensor]] = []

    def new(self) -> list[torch.Tensor]:
        """Those that were not there after the last call."""
        self._calls += 1
        if self._calls == self._search_at:
            self._search_at *= 2
            self._slots = list(self._find())
        if not self._slots:
            return []
        found = [t for held, name in self._slots for t in differentiable(held.get(name))]
        before = {id(tensor) for ref in self._before if (tensor := ref()) is not None}
        self._before = [weakref.ref(tensor) for tensor in found]
        return [tensor for tensor in found if id(tensor) not in before]

    def _find(self) -> Iterator[tuple[dict[str, Any], str]]:
        for module in self._module.modules():
            for name, value in vars(module).items():
                if name not in _OF_MODULES and differentiable(value):
                    yield vars(module), name


#: Attributes that every module has; parameters, buffers and children are no results.
_OF_MODULES = frozenset(vars(nn.Module()))


Hook = Callable[["CallHooks"], None]


class CallHooks:
    """The hooks on the tensors of one call of the module of `point`.

    began: number at which it began, 0 if unknown, as in recomputation. around: the call that was
    running then, of the same point. call, counts: how its end was numbered, and whether its
    backward pass counts as one of the unit. epoch: of the unit at its end. in_order: autograd has
    done what the call left before it comes to what its inputs are of. enter, leave: called where
    its backward pass begins and ends.
    """

    __slots__ = (
        *("__weakref__", "_enter", "_graph", "_leave", "_owed", "_parts"),
        *("around", "began", "call", "counts", "epoch", "in_order", "point"),
    )

    def __init__(self, point: GatherPoint, began: int, enter: Hook, leave: Hook) -> None:
        self.point = point
        self.around: CallHooks | None = point.running
        point.running = self
        self.began = began
        self._enter, self._leave = enter, leave
        self._graph = NO_BACKWARD
        self._parts = self._owed = 0
        self.in_order = False

    def watch_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave when the gradients of all `tensors` are complete."""
        inner = [tensor for tensor in tensors if not tensor.is_leaf]
        if len(inner) == 1:
            inner[0].register_hook(self.left)
        elif inner:
            register_multi_grad_hook(inner, self.left, mode="all")
        self._parts = bool(inner)
        self.in_order = len(inner) == len(tensors)
        if not self.in_order:
            own = {id(tensor): tensor for tensor in tensors if tensor.is_leaf}
            self._parts += len(own)
            for tensor in own.values():
                # A leaf may outlive this call and its graph, and must not keep them.
                left = functools.partial(_leave, weakref.WeakMethod(self.left))
                weakref.finalize(self, tensor.register_hook(left).remove).atexit = False

    def watch_outputs(
        self, tensors: Iterable[torch.Tensor], call: Call | None, *, counts: bool
    ) -> None:
        """Enter when the first gradient of `tensors` arrives."""
        self.call = call
        self.counts = counts
        self.epoch = self.point.unit.epoch
        for tensor in tensors:
            tensor.register_hook(self._entered)

    def _entered(self, _gradient: torch.Tensor) -> None:
        graph = current_backward()
        if graph != self._graph:
            self._graph = graph
            self._owed = self._parts
            self._enter(self)

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
            self._leave(self)


def _leave(left: weakref.WeakMethod[Callable[[object], None]], gradient: object) -> None:
    if (leave := left()) is not None:
        leave(gradient)
