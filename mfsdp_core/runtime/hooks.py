"""Where the runtime is called from: module hooks, parameter hooks, and those of `call_tensors`.

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
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from mfsdp_core.errors import CapabilityNotBuiltError
from mfsdp_core.runtime.bucket import Bucket
from mfsdp_core.runtime.call_tensors import LeftTensors
from mfsdp_core.runtime.calls import inside_backward
from mfsdp_core.runtime.context import ShardedContext
from mfsdp_core.runtime.units import GatherPoint, Unit, is_called

Hook = Callable[..., None]
#: What compiles the frames that this thread enters; None where nothing does.
_compiler: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def attach_hooks(context: ShardedContext) -> None:
    """Hook every module at which `context` gathers, and the parameters of every unit."""
    for point in context.schedule.points:
        before, after = _hooks_of(context, point)
        point.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        point.module.register_forward_hook(after, with_kwargs=True)
    for unit in context.grads.units:
        _hook_parameters(context, unit)
    _hook_modules_of_root(context)
    _hook_ways_in(context)
    _hook_two_payloads(context)


def _hooks_of(context: ShardedContext, point: GatherPoint) -> tuple[Hook, Hook]:
    """What a call of a module begins and ends with.

    torch.compile traces through hooks, and would replay what they did once (gathers, ledger
    entries). Disabled, they break the graph: what lies between them is compiled.
    """
    before = partial(context.before_forward, point)
    return _untraced(before), _untraced(partial(context.after_forward, point, LeftTensors(point)))


def _hook_ways_in(context: ShardedContext) -> None:
    """Modules around units that may be called past the root, as by `generate` of an adapter.

    Without gradients such a call is one of the root, whose weights are read in it.
    """
    root = next(p for p in context.schedule.points if p.is_unit and p.unit is context.root)
    units = {id(unit.module) for unit in context.units}
    begin, end = _hooks_of(context, root)

    def before(module: nn.Module, _args: Any) -> None:
        if not (root.unit.open or torch.is_grad_enabled() or inside_backward()):
            begin(root.module, (), {})
            opened.append(module)

    def after(module: nn.Module, _args: Any, _output: Any) -> None:
        if opened[-1:] == [module]:
            end(root.module, (), {}, None)

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
        # Recomputation may be stopped, by an exception, once it has saved what is wanted.
        ended = _untraced(partial(context.end_recomputation, point))
        point.module.register_forward_hook(ended, always_call=True)
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


def _untraced(hook: Hook) -> Hook:
    """`hook` itself while nothing is compiled: torch's wrapper costs as much as the hook."""
    disabled: Hook = torch.compiler.disable(hook)

    def run(*arguments: Any) -> None:
        if _compiler() is None:
            hook(*arguments)
        else:
            disabled(*arguments)

    untraced: Hook = torch._dynamo.decorators.skip(run)
    return untraced
