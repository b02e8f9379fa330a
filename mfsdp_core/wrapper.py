"""The wrapped model: what a training loop calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from mfsdp_core.comm.wire_log import WireLog
from mfsdp_core.errors import CapabilityNotBuiltError, LifecycleError, PolicyChangeError
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.precision.policy import MixedPrecisionPolicy
from mfsdp_core.runtime.build import Environment, group_dtypes
from mfsdp_core.runtime.context import ShardedContext
from mfsdp_core.runtime.parameter_group import ParameterGroup
from mfsdp_core.state.described import describe_modules
from mfsdp_core.state.model_state import load_model_state
from mfsdp_core.state.owner import OWNER


@dataclass(frozen=True)
class BucketFacts:
    """One flat buffer.

    name: as in events. unit: "" is the root. parameters: first name of each, in buffer order.
    elements: of the whole buffer, padding included.
    """

    name: str
    unit: str
    parameters: tuple[str, ...]
    elements: int
    trainable: bool


class MegatronFSDP(nn.Module):
    """A sharded model. Built by `fully_shard_model`, not directly.

    module: the original module; outside of a forward or backward pass its parameters are DTensor
    shards of the main weights. events, wire_log, ledger: what the core did, sent and holds.

    A cycle is what lies between two `zero_grad_buffer` calls: one or more backward passes, one
    reduction where gradients are held whole, one optimizer step.
    """

    def __init__(
        self,
        module: nn.Module,
        context: ShardedContext,
        environment: Environment,
        policy: MixedPrecisionPolicy,
    ) -> None:
        super().__init__()
        self.module = module
        self.events = environment.events
        self.ledger: MemoryLedger = environment.ledger
        self.wire_log = WireLog()
        self.events.subscribe(self.wire_log, kinds=("collective",))
        self.param_and_grad_buffer = _BufferRegistration()
        self._dense, self._experts = environment.dense, environment.experts
        self._context = context
        self._policy = policy
        owner = weakref.ref(self)
        for group in self._groups():
            for managed in group.parameters:
                setattr(managed.sharded, OWNER, owner)
                raw: Any = managed.raw
                raw.get_main_grad = _MainGradient(group, managed.raw)
                if group.gradients is not None:
                    raw.overwrite_main_grad = not group.gradients.holds_whole
        parameters = (managed for group in self._groups() for managed in group.parameters)
        describe_modules(holder for managed in parameters for holder, _ in managed.holders)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module through its `__call__`, whose hooks gather the root's weights (R8)."""
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            self._context.recover()
            raise

    @property
    def pool_plan(self) -> dict[str, Any]:
        """Buckets that come and go, and the pools they sit in, as plain data.

        allocator; pools: role, slots, areas of a slot, offsets and sizes in bytes; units: per
        bucket its role, dtype, bytes, padding, placement (`pool` or who serves it instead), the
        slot that its unit has, and the bytes of its area that it does not need.
        """
        return self._context.allocators.plan_document()

    # --- microbatches -------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside are not the last of their cycle.

        Strategies that hold no whole gradient still reduce every microbatch.
        """
        with self._context.marking_last(is_last=False):
            yield

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Backward passes inside end their cycle: gradients are reduced, finished and attached."""
        with self._context.marking_last(is_last=True):
            yield

    @property
    def model_auto_sync(self) -> bool:
        """Whether a backward pass that began now would end its cycle."""
        return self._context.is_last_microbatch

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Whether a backward pass outside of `no_sync` and `sync` ends its cycle."""
        self._context.auto_sync = sync_model

    # --- gradients ----------------------------------------------------------------------------

    def start_grad_sync(self, *_unused: Any) -> None:
        """Issue the reductions that the cycle still owes, without waiting for them."""
        with torch.no_grad():
            self._context.grads.issue_rest()

    def synchronize_gradient_reduce(self) -> None:
        """Wait for the reductions under way."""
        with torch.no_grad():
            self._context.grads.land_all()

    def attach_grad_to_optimizer_state(self) -> None:
        """Set `.grad` of the sharded parameters to the reduced gradients."""
        self._context.grads.attach()

    def finish_grad_sync(self, *_unused: Any) -> None:
        """Issue what has not been issued, wait for all of it, attach it. Idempotent in a cycle.

        Without a backward pass in the cycle there is nothing to attach, and `.grad` stays None.
        """
        with torch.no_grad():
            self._context.finish_gradients()

    def zero_grad_buffer(self) -> None:
        """Begin a new cycle: gradients are detached and forgotten."""
        self._context.begin_cycle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Same as `zero_grad_buffer`; gradients become None whatever `set_to_none` says."""
        super().zero_grad(set_to_none=set_to_none)
        self.zero_grad_buffer()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply the reduced gradients of this cycle; those it still owes are finished first.

        With calculate_per_token_loss, this is where the caller divides by the number of tokens.
        """
        with torch.no_grad():
            self._context.finish_gradients()
            self._context.grads.scale(scaling_factor)
            self._context.grads.attach()

    # --- weights ------------------------------------------------------------------------------

    @torch.no_grad()
    def start_param_sync(self, *_unused: Any, force_sync: bool = False, **_ignored: Any) -> None:
        """Start gathering what the next forward pass needs first; `force_sync` also waits."""
        context = self._context
        context.params.issue(context.root, "forward")
        context.gathering.ahead(context.gathering.points[0], "forward")
        if force_sync:
            self.synchronize_param_gather()

    @torch.no_grad()
    def synchronize_param_gather(self) -> None:
        """Wait for the gathers under way."""
        self._context.params.complete()

    @torch.no_grad()
    def install_optimized_model_weights(self) -> None:
        """Bring updated main weights into this rank's compute weights.

        Other ranks' parts are gathered when a unit next runs.
        """
        self._context.params.install()

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Make the weights of all ranks those of the first rank, where ranks hold whole ones.

        A sharded weight has one owner per row and needs no broadcast.
        """
        self._context.params.broadcast()

    # --- dtypes -------------------------------------------------------------------------------

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The dtype policy in force."""
        return self._policy

    def reset_mixed_precision_policy(self, mp_policy: MixedPrecisionPolicy) -> None:
        """Change the dtype of gradient communication, from the next bucket on.

        Allowed between microbatches, since buckets are allocated when they are needed.

        Raises:
            PolicyChangeError: a main dtype differs from the one the buffers were built with, or a
                bucket in the old dtype is live (R5).
        """
        for name in ("main_params_dtype", "main_grads_dtype"):
            built, wanted = getattr(self._policy, name), getattr(mp_policy, name)
            if built != wanted:
                raise PolicyChangeError(
                    f"{name} is {built} in this model's buffers and cannot become {wanted}. "
                    "Only grad_comm_dtype may change; build a new model for the rest."
                )
        pooled = self._context.allocators.pools
        changes = mp_policy.grad_comm_dtype != self._policy.grad_comm_dtype
        if changes and pooled:
            raise PolicyChangeError(
                "grad_comm_dtype cannot change with buffer pools, whose slots were planned for "
                f"{self._policy.grad_comm_dtype}. Use allocator='storage_resize', or keep it."
            )
        if not self._context.grads.is_idle:
            raise PolicyChangeError(
                "grad_comm_dtype cannot change while a gradient bucket is live. Change it between "
                "backward passes."
            )
        for group in self._groups():
            if group.gradients is not None:
                group.dtypes = group_dtypes(group.dtypes.compute, mp_policy, trainable=True)
                group.gradients.set_comm_dtype(group.dtypes)
        self._policy = mp_policy

    @contextmanager
    def mixed_precision_context(self, mp_policy: MixedPrecisionPolicy) -> Iterator[None]:
        """`mp_policy` within the block, the previous one after it; rules as for the reset."""
        previous = self._policy
        self.reset_mixed_precision_policy(mp_policy)
        try:
            yield
        finally:
            self.reset_mixed_precision_policy(previous)

    # --- state --------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Refuse moves and casts: parameters are views of buffers that they would be cut from.

        Raises:
            LifecycleError: `fn` changes the device or dtype.
        """
        del recurse  # there is nothing to recurse into
        for parameter in self.parameters():
            probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            changed = fn(probe)
            if (changed.dtype, changed.device) != (probe.dtype, probe.device):
                raise LifecycleError(
                    "a sharded model cannot change its dtype or device "
                    f"({probe.dtype} on {probe.device} to {changed.dtype} on {changed.device}). "
                    "Move or cast the module before fully_shard_model."
                )
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        """Refuse: hooks and buffers would be shared with the copy.

        Raises:
            LifecycleError: always.
        """
        raise LifecycleError(
            "a sharded model cannot be copied. Copy its state_dict(), or shard a second module."
        )

    @torch.no_grad()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load whole tensors, or shards of the same sharding, under names starting `module.`.

        Main weights take the values in their own dtype; compute weights follow. No communication.

        Raises:
            LifecycleError: `assign=True`, which would cut parameters from their buffers.
            StateDictError: with `strict`, missing or unexpected names; always, wrong shapes.
        """
        if assign:
            raise LifecycleError(
                "load_state_dict(assign=True) would replace sharded parameters. Use assign=False."
            )
        result = load_model_state(self, self._groups(), state_dict, strict=strict)
        self._context.params.install(frozen_too=True)
        return result

    def buckets(self) -> list[BucketFacts]:
        """Every flat buffer with the parameters it holds, the root's first, then unit by unit."""
        return [
            BucketFacts(
                group.plan.name,
                group.plan.unit,
                tuple(managed.names[0] for managed in group.parameters),
                group.plan.layout.total_elements,
                group.is_trainable,
            )
            for group in self._groups()
        ]

    @cached_property
    def checkpoint_group(self) -> dist.ProcessGroup:
        """All ranks that hold a part of the model. Beside tensor parallelism they make it together.

        Raises:
            CapabilityNotBuiltError: ranks hold different experts under equal names.
        """
        if self._experts is not None and self._experts.ranks != self._dense.ranks:
            raise CapabilityNotBuiltError(
                "checkpoints of experts that are spread over ranks are not built: different "
                "experts go by equal names there, and would replace each other. Gather and save "
                "them by rank."
            )
        return self._dense.group_of_all()

    def sharded_by_original(self) -> dict[int, nn.Parameter]:
        """By id of each original parameter, the shard that stands for it."""
        return {p.original_id: p.sharded for group in self._groups() for p in group.parameters}

    def _groups(self) -> list[ParameterGroup]:
        units = (self._context.root, *self._context.units)
        return [group for unit in units for group in unit.groups]


class _MainGradient:
    """`parameter.get_main_grad()`: where a fused kernel writes the parameter's gradient."""

    def __init__(self, group: ParameterGroup, raw: nn.Parameter) -> None:
        self._gradients = group.gradients
        self._index = next(i for i, p in enumerate(group.parameters) if p.raw is raw)

    def __call__(self) -> torch.Tensor:
        if self._gradients is None:
            raise LifecycleError("get_main_grad() of a frozen parameter: it has no gradient.")
        return self._gradients.target(self._index)


class _BufferRegistration:
    """Upstream's handle for registering NCCL user buffers by hand."""

    def manual_buffer_registration(self) -> None:
        """Refused: there are no user buffers in this version."""
        raise CapabilityNotBuiltError(
            "manual_buffer_registration() needs NCCL user buffers (nccl_ub), which this version "
            "does not build. Remove the call."
        )
