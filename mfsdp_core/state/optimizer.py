"""Teaching an optimizer about sharded weights, without a wrapper class around it.

Some keep gradients or weights of their own, as Transformer Engine's FusedAdam. They are known by
their attributes: `use_decoupled_grad` (whether gradients are read from `decoupled_grad`),
`master_weights` (whether the optimizer keeps a copy of every weight), and a `step` that takes the
loss scale as an argument.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch

from mfsdp_core.errors import (
    CapabilityNotBuiltError,
    ConfigurationError,
    LifecycleError,
    Refusal,
    refuse,
)
from mfsdp_core.shard.chunk import offsets_of
from mfsdp_core.shard.dtensor import local_tensor
from mfsdp_core.state.local_step import LocalStep
from mfsdp_core.state.optimizer_parameters import ELEMENTWISE, Owners, are_whole, parameters_of
from mfsdp_core.state.optimizer_state import (
    complete_state,
    is_initial,
    is_known,
    serve_state_dicts,
)
from mfsdp_core.state.whole_matrices import (
    WholeStep,
    needs_whole_matrices,
    refuse_unserved,
    whole_states,
)

#: Attribute of an optimizer whose methods have been replaced.
_PREPARED = "_mfsdp_prepared"


def prepare_optimizer(
    optimizer: torch.optim.Optimizer, *, whole_matrices: bool | None = None
) -> torch.optim.Optimizer:
    """Make `optimizer`, built over sharded parameters, finish gradients and refresh weights.

    `step(closure=None, sync_grad_before_optimizer_step=True, install_optimized_model_weights=True)`
    finishes the gradients, steps, and brings the updated main weights into the compute weights. A
    closure computes a loss and its gradients, which are then finished; the loss is returned.
    `zero_grad(set_to_none=True, zero_grad_buffer=True)` also clears the gradient buffers, which
    begins a new cycle, unless another optimizer has yet to step with its gradients. The same object
    is returned, and `step` stays a method of it, which learning-rate schedulers rely on. Nothing is
    stepped or allocated ahead of the first real step (R4). Preparing an optimizer twice is
    preparing it once.

    whole_matrices: step on whole tensors, each on one rank: see [Note: whole matrices]. None is for
    Muon and Adafactor of torch; an optimizer of others that needs whole tensors has to say True.

    Raises:
        ConfigurationError: no parameter of the optimizer is sharded by this package, or neither
            shards nor whole tensors serve it, or it reads gradients where there are none.
    """
    owners = Owners(parameters_of(optimizer))
    patched: Any = optimizer
    _refuse_unsharded(optimizer, owners)
    refuse(_unprepared(optimizer, owners))
    refuse_unserved(optimizer)
    needed, name = needs_whole_matrices(optimizer), type(optimizer).__name__
    is_whole = needed if whole_matrices is None else whole_matrices
    refuse(_unread_gradients(optimizer, owners, is_whole=is_whole))
    if hasattr(optimizer, _PREPARED):
        return optimizer
    _warn_of_two_main_weights(optimizer)
    setattr(optimizer, _PREPARED, True)
    patched._mfsdp_warned = False
    wrong = f"whole_matrices=False, and {name} computes with rows and columns of whole matrices"
    is_wrong = needed and whole_matrices is False
    refuse([(is_wrong, ConfigurationError, f"{wrong}: leave it out.")])
    kind = WholeStep if is_whole and not are_whole(parameters_of(optimizer)) else LocalStep
    base: LocalStep | WholeStep = kind(optimizer, optimizer.step)
    patched.step = MethodType(_step_method(optimizer, owners, base), optimizer)
    patched.zero_grad = MethodType(_zero_grad_method(optimizer.zero_grad, owners), optimizer)
    serve_state_dicts(optimizer)
    for owner in owners:
        owner.register_optimizer(optimizer, stepped=False)
        ledger = owner.ledger.host if owner.offloads else owner.ledger
        ledger.measure("optimizer_state", _state_meter(optimizer))
    return optimizer


def _unprepared(optimizer: torch.optim.Optimizer, owners: Owners) -> Iterator[Refusal]:
    yield (
        not any(owners),
        ConfigurationError,
        "fully_shard_optimizer expects an optimizer over the parameters of a model that "
        "fully_shard_model has returned; none of its parameters is. Build the optimizer from "
        "model.parameters() after sharding, or use fully_shard(module, optimizer).",
    )
    yield (
        any(kind.__module__.startswith("torchao.") for kind in type(optimizer).__mro__),
        ConfigurationError,
        f"{type(optimizer).__name__} keeps moments as codes in blocks that shards may cut: "
        "expected an optimizer of torch, or PrecisionAwareAdamW with BF16 moments.",
    )


def _unread_gradients(
    optimizer: torch.optim.Optimizer, owners: Owners, *, is_whole: bool
) -> Iterator[Refusal]:
    """Who looks for gradients where there are none would train nothing; whole ones are `grad`."""
    known = is_whole or hasattr(optimizer, "use_decoupled_grad") or type(optimizer) in ELEMENTWISE
    reads = not is_whole and bool(getattr(optimizer, "use_decoupled_grad", False))
    places = {True: "decoupled_grad", False: "grad"}
    for owner in owners:
        attaches = owner.decouples_gradients
        yield (
            known and attaches != reads,
            ConfigurationError,
            f"{type(optimizer).__name__} reads gradients from .{places[reads]}, and the model "
            f"attaches them as .{places[attaches]}: nothing would be trained. Pass "
            f"use_decoupled_grad={reads} to fully_shard_model, or use another optimizer.",
        )


def _warn_of_two_main_weights(optimizer: Any) -> None:
    """Say what a copy of FP32 main weights costs, which nothing needs (Megatron-LM#4133)."""
    if getattr(optimizer, "master_weights", False) is not True:
        return
    kept = getattr(optimizer, "master_weight_dtype", torch.float32)
    shards = [local_tensor(parameter) for parameter in parameters_of(optimizer)]
    wasted = sum(shard.numel() for shard in shards if shard.dtype == torch.float32) * kept.itemsize
    if wasted:
        warnings.warn(
            f"{type(optimizer).__name__}(master_weights=True) keeps a second copy of FP32 main "
            f"weights: {wasted} B on this rank. Leave it at False, or make the model's own weights "
            "the main ones: MixedPrecisionPolicy(main_params_dtype=None).",
            RuntimeWarning,
            stacklevel=4,
        )


def _refuse_unsharded(optimizer: torch.optim.Optimizer, owners: Owners) -> None:
    """Refuse parameters of a model that nobody shards: each rank would go its own way.

    Raises:
        ConfigurationError: one was added after sharding, or read while its unit ran.
    """
    own = {name: p for owner in owners for name, p in owner.named_parameters()}
    unsharded = {
        id(p): name for name, p in own.items() if p.requires_grad and offsets_of(p) is None
    }
    for parameter in parameters_of(optimizer):
        is_shown = getattr(parameter, "__fsdp_param__", False) and offsets_of(parameter) is None
        if is_shown or id(parameter) in unsharded:
            name = unsharded.get(id(parameter), "a parameter that a running unit computes with")
            raise ConfigurationError(
                f"the optimizer has {name}, which is not sharded: nobody would average its "
                "gradients over ranks. Build the model, with adapters and parametrizations, before "
                "fully_shard_model, or freeze what is added; build the optimizer between passes."
            )


def _step_method(
    optimizer: torch.optim.Optimizer, owners: Owners, base: LocalStep | WholeStep
) -> Callable[..., Any]:
    finish, groups = partial(_finish, owners), len(optimizer.param_groups)

    def install(*, wanted: bool = True) -> None:
        for owner in owners if wanted else ():
            owner.install_optimized_model_weights()

    def step(
        _self: torch.optim.Optimizer,
        closure: Callable[[], Any] | None = None,
        *,
        sync_grad_before_optimizer_step: bool = True,
        install_optimized_model_weights: bool = True,
    ) -> Any:
        """See `prepare_optimizer`."""
        refuse_loss_scale(_self)
        if len(_self.param_groups) != groups:
            _refuse_unsharded(_self, owners)

        def evaluate() -> Any:
            assert closure is not None
            install()  # an optimizer may evaluate again after it has moved the weights
            with torch.enable_grad():
                loss = closure()
            finish(wanted=sync_grad_before_optimizer_step)
            return loss

        if closure is None and not any(owner.backward_seen for owner in owners):
            if _is_initialisation(_self):
                complete_state(_self)
                return None
            _refuse_lost_gradients(_self, owners)
        if closure is not None and base.is_local:
            # First, as every such optimizer does: the step sees other tensors than the model.
            result = evaluate()
            base()
        else:
            finish(wanted=sync_grad_before_optimizer_step, step_of=_self)
            result = base() if closure is None or base.is_local else base(evaluate)
        install(wanted=install_optimized_model_weights)
        for owner in owners:
            owner.register_optimizer(_self, stepped=True)
        return result

    return step


def refuse_loss_scale(optimizer: Any) -> None:
    """At a step: refuse a loss scale that would not reach the optimizer.

    Raises:
        CapabilityNotBuiltError: a GradScaler has left its scale to a step that takes it otherwise.
    """
    if not getattr(optimizer, "capturable", False) or not hasattr(optimizer, "grad_scale"):
        return
    if "grad_scaler" in inspect.signature(type(optimizer).step).parameters:
        raise CapabilityNotBuiltError(
            f"{type(optimizer).__name__}(capturable=True) takes a GradScaler as an argument of "
            "step(), which is not passed on: gradients would stay scaled. Call "
            "scaler.unscale_(optimizer) with capturable=False, or train in BF16."
        )


def _refuse_lost_gradients(optimizer: torch.optim.Optimizer, owners: Owners) -> None:
    has_gradient = any(parameter.grad is not None for parameter in parameters_of(optimizer))
    if not has_gradient and any(owner.awaits_backward for owner in owners):
        raise LifecycleError(
            "optimizer.step() found no gradient at all, although a forward pass has built a graph. "
            "backward(inputs=...) cannot name sharded parameters, which no graph holds: call "
            "backward(), and freeze before sharding what shall get no gradient. A forward pass "
            "without a backward pass belongs under torch.no_grad()."
        )


def _warn_of_unread_gradients(optimizer: Any, owner: Any) -> None:
    """Once, of a step that finishes gradients after somebody may have looked for them."""
    if optimizer._mfsdp_warned:
        return
    optimizer._mfsdp_warned = True
    is_open = " and a no_sync() of the model is still open" if owner.in_no_sync else ""
    warnings.warn(
        "optimizer.step() finishes the reduction of gradients: the last microbatch was not synced"
        f"{is_open}. Parameters had no new gradient until now, so whatever has read them since, "
        "such as torch.nn.utils.clip_grad_norm_, saw nothing and changed nothing. Run the last "
        "microbatch in model.sync(), or call model.finish_grad_sync() or "
        "mfsdp_core.clip_grad_norm_ before the step.",
        RuntimeWarning,
        stacklevel=4,
    )


def _finish(owners: Owners, *, wanted: bool, step_of: torch.optim.Optimizer | None = None) -> None:
    """Before a step. wanted: whether to finish gradients as well. step_of: who steps at once."""
    for owner in owners:
        # A gather ahead of need reads the weights that the step is about to write.
        owner.synchronize_param_gather()
        if wanted:
            is_unread = owner.microbatch_count and not owner.shows_gradients
            owner.finish_grad_sync()
            if step_of is not None and is_unread:
                _warn_of_unread_gradients(step_of, owner)


def _is_initialisation(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step without gradients would be one that only makes state.

    torch.distributed.checkpoint.state_dict takes such a step, with a learning rate of zero.
    """
    return (
        is_known(optimizer)
        and not optimizer.state
        and not whole_states(optimizer)
        and all(group.get("lr") == 0 for group in optimizer.param_groups)
    )


def _zero_grad_method(base: Callable[..., None], owners: Owners) -> Callable[..., None]:
    def zero_grad(
        _self: torch.optim.Optimizer, set_to_none: bool = True, *, zero_grad_buffer: bool = True
    ) -> None:
        """See `prepare_optimizer`."""
        if not set_to_none and getattr(_self, "use_decoupled_grad", False):
            # Such an optimizer fails where there are no gradients.
            for parameter in parameters_of(_self):
                gradient = getattr(parameter, "decoupled_grad", None)
                if gradient is not None:
                    local_tensor(gradient).zero_()
        else:
            base(set_to_none=set_to_none)
        for owner in owners if zero_grad_buffer else ():
            owner.zero_grad_of(_self, set_to_none=set_to_none)

    return zero_grad


def check_replaceable(
    optimizer: torch.optim.Optimizer, originals: Iterable[torch.nn.Parameter]
) -> None:
    """Refuse an optimizer whose parameters cannot be swapped for shards.

    Raises:
        ConfigurationError: the optimizer has state, or holds parameters of another model.
    """
    if not all(map(is_initial, optimizer.state.values())):
        raise ConfigurationError(
            "fully_shard expects an optimizer that has not stepped yet: its state belongs to "
            "unsharded parameters. Shard first, or build a new optimizer."
        )
    known = {id(parameter) for parameter in originals}
    foreign = [p for p in parameters_of(optimizer) if id(p) not in known]
    if foreign:
        shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3])
        raise ConfigurationError(
            f"fully_shard: {len(foreign)} parameters of the optimizer (the first of shape "
            f"{shapes}) are not of this module. Build the optimizer from module.parameters()."
        )


def replace_parameters(
    optimizer: torch.optim.Optimizer, replacement: dict[int, torch.nn.Parameter]
) -> None:
    """Swap the optimizer's parameters for their shards, in place, group by group.

    replacement: id of an original parameter -> its sharded face. Groups keep their options and
    order; a tied parameter stays one entry.
    """
    for group in optimizer.param_groups:
        group["params"] = [replacement[id(parameter)] for parameter in group["params"]]
    if optimizer.state:  # made when it was built, and not changed since: see `check_replaceable`
        optimizer.state.clear()
        complete_state(optimizer)


def _state_meter(optimizer: torch.optim.Optimizer) -> Callable[[], int]:
    """Bytes of this rank's optimizer state; scalars such as step counters count as well."""
    reference = weakref.ref(optimizer)

    def meter() -> int:
        alive = reference()
        states = (*alive.state.values(), *whole_states(alive)) if alive is not None else ()
        values = (value for state in states for value in state.values())
        tensors = (local_tensor(value) for value in values if isinstance(value, torch.Tensor))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    return meter
