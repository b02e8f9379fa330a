"""The wrapped model: what a training loop calls."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from mfsdp_core.comm.data_parallel import DataParallelAxes
from mfsdp_core.comm.wire_log import WireLog
from mfsdp_core.errors import CapabilityNotBuiltError, LifecycleError, PolicyChangeError
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.plan.options import Options
from mfsdp_core.precision.policy import MixedPrecisionPolicy
from mfsdp_core.runtime.bucket import Bucket, BucketFacts
from mfsdp_core.runtime.bucket_spec import group_dtypes
from mfsdp_core.runtime.gathering import refuse_ungathered
from mfsdp_core.sharding import shard_module
from mfsdp_core.state.model_state import load_model_state, refuse_moves, serve_holders, shard_of
from mfsdp_core.state.optimizer_parameters import OWNER
from mfsdp_core.upstream_view import DistIndex, ParamAndGradBuffer, mark


def _nobody() -> None:
    """Who owns a parameter that no sharded model does."""


class MegatronFSDP(nn.Module):
    """A sharded model, as `fully_shard_model` returns it.

    `fully_shard_model` makes it.

    module: the original module; outside of a forward or backward pass its parameters are DTensor
    shards of the main weights. events, wire_log, ledger: what the core did, sent and holds.
    transports: by group, what carries its bytes.

    A cycle is what lies between two `zero_grad_buffer` calls: one or more backward passes, one
    reduction where gradients are held whole, one optimizer step.
    """

    def __init__(self, module: nn.Module, options: Options) -> None:
        """Shard `module` in place as `options` say, and wrap it. Collective.

        Raises:
            ConfigurationError: see `fully_shard_model`.
        """
        super().__init__()
        self._context, environment = shard_module(module, options)
        self.module = module
        self.events = environment.events
        self.ledger: MemoryLedger = environment.ledger
        self.wire_log = WireLog()
        self.events.subscribe(self.wire_log, kinds=("collective",))
        self.streams = environment.streams
        self.device = self.streams.device
        self.dist_index = DistIndex(environment.dense.named_groups()[0][1])
        self.cuda_graph_mode = options.cuda_graph_mode
        if self.cuda_graph_mode:
            self.streams.expect_captures()
        self.decouples_gradients = options.use_decoupled_grad
        self.offloads = options.offload
        self._environment = environment
        self._policy = options.mixed_precision_policy
        self.transports = self._context.transports
        self._optimizers: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        buffers = self._context.user_buffers
        self.param_and_grad_buffer = ParamAndGradBuffer(self._buckets(), buffers)
        owner = weakref.ref(self)
        for bucket in self._buckets():
            for managed in bucket.parameters:
                setattr(managed.sharded, OWNER, owner)
                mark(managed, bucket, self.dist_index)
            serve_holders(bucket.parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module through its `__call__`, whose hooks gather the root's weights (R8)."""
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            self._context.recover()
            refuse_ungathered(error)
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

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Whether a backward pass outside of `no_sync` and `sync` ends its cycle."""
        self._context.auto_sync = bool(sync_model)

    def _mark_last(self, is_last: bool) -> None:
        self._context.marked_last = bool(is_last)

    def _set_microbatch_count(self, count: int) -> None:
        self._context.grads.unfinished_passes = count

    model_auto_sync = property(
        attrgetter("_context.is_last_microbatch"),
        set_model_auto_sync,
        doc="Whether every backward pass ends its cycle; `sync` makes it so within its block.",
    )
    is_last_microbatch = property(
        attrgetter("_context.is_last_microbatch"),
        _mark_last,
        doc="""Whether a backward pass that began now would end its cycle.

        May be set, for loops that say so themselves: True makes backward passes outside of
        `no_sync` and `sync` end their cycle, as auto-sync does.
        """,
    )
    in_no_sync = property(attrgetter("_context.in_no_sync"), doc="Whether a `no_sync` is open.")
    backward_seen = property(
        attrgetter("_context.grads.backward_seen"),
        doc="Whether a backward pass has run in this cycle.",
    )
    shows_gradients = property(
        attrgetter("_context.grads.shows_all"),
        doc="Whether parameters have all gradients, but for those that the user has removed.",
    )
    awaits_backward = property(
        attrgetter("_context.grads.awaits_backward"),
        doc="Whether a forward pass of this cycle has built a graph that gave no gradient yet.",
    )
    microbatch_count = property(
        attrgetter("_context.grads.unfinished_passes"),
        _set_microbatch_count,
        doc="""Backward passes since gradients were last finished or forgotten.

        May be set; it is a counter for the caller. A step that finds passes warns of them.
        """,
    )
    mp_policy = property(attrgetter("_policy"), doc="The dtype policy in force.")

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

    def axes_of(self, *, is_expert: bool) -> DataParallelAxes:
        """What parameters of one kind are shared out over."""
        return self._environment.axes(is_expert=is_expert)

    @property
    def buffer_registration(self) -> dict[str, Any] | None:
        """What `nccl_ub` has got for each group (`UserBuffers.report`); None without it."""
        buffers = self._context.user_buffers
        return None if buffers is None else buffers.report()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Issue what has not been issued, wait for all of it, attach it. Idempotent in a cycle.

        Without a backward pass in the cycle there is nothing to attach, and `.grad` stays None.
        force_all_reduce: as under upstream, both values do the same; Megatron-LM's interface to
        data parallelism has it, where it asks for whole gradients on every rank.
        """
        del force_all_reduce
        with torch.no_grad():
            self._context.finish_gradients()

    def zero_grad_buffer(self) -> None:
        """Begin a new cycle: gradients are detached and forgotten."""
        self._context.begin_cycle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a new cycle; without `set_to_none`, gradients that there were become zeros."""
        super().zero_grad(set_to_none=set_to_none)
        self._context.begin_cycle(keeps_zeros=not set_to_none)

    def zero_grad_of(self, optimizer: torch.optim.Optimizer, *, set_to_none: bool) -> None:
        """As `zero_grad`, after `optimizer` has cleared those of its own parameters.

        Nothing else is cleared while another optimizer has yet to step with its gradients.
        """
        now = self._context.grads.attachments
        waiting = (
            parameter.grad is not None and getattr(parameter, OWNER, _nobody)() is self
            for other, seen in self._optimizers.items()
            if other is not optimizer and seen != now
            for group in other.param_groups
            for parameter in group["params"]
        )
        if not any(waiting):
            self.zero_grad(set_to_none=set_to_none)

    def register_optimizer(self, optimizer: torch.optim.Optimizer, *, stepped: bool) -> None:
        """An optimizer was made for this model, or has stepped with the gradients of now."""
        self._optimizers[optimizer] = self._context.grads.attachments if stepped else -1

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
    def start_param_sync(
        self, *_unused: Any, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """Start gathering what the next forward pass needs first.

        force_sync: also wait. force_dispatch: as under upstream, both values do the same, since
        gathers always start here. Positional arguments are chunks of Megatron-Core's pipeline
        schedules, of which a model has one.
        """
        del force_dispatch
        context = self._context
        context.schedule.follow_changes()
        context.schedule.issue(context.root, "forward")
        context.schedule.ahead(context.schedule.points[0], "forward")
        if force_sync:
            self.synchronize_param_gather()

    @torch.no_grad()
    def synchronize_param_gather(self) -> None:
        """Wait for the gathers under way."""
        self._context.schedule.wait()

    @torch.no_grad()
    def install_optimized_model_weights(self) -> None:
        """Bring updated main weights into this rank's compute weights.

        Other ranks' parts are gathered when a unit next runs.
        """
        self._context.schedule.install()

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Make the weights of all ranks those of the first rank, where ranks hold whole ones.

        A sharded weight has one owner per row and needs no broadcast.
        """
        self._context.schedule.broadcast()

    # --- dtypes -------------------------------------------------------------------------------

    def reset_mixed_precision_policy(self, mixed_precision_policy: MixedPrecisionPolicy) -> None:
        """Take the dtypes of gradient communication from a policy, from the next bucket on.

        Those of the wire and of sums over ranks (`reduce_dtype`).

        The model keeps its own main dtypes, whatever the policy says of them. Allowed between
        microbatches, since buckets are allocated when they are needed.

        Raises:
            PolicyChangeError: a bucket in the old dtype is live (R5), or buffers are pooled.
            ConfigurationError: sums that the transport cannot take.
        """
        given, policy = mixed_precision_policy, self._policy
        wanted = dataclasses.replace(
            policy, grad_comm_dtype=given.grad_comm_dtype, reduce_dtype=given.reduce_dtype
        )
        if wanted == policy:
            return
        if self._context.allocators.pools:
            raise PolicyChangeError(
                "grad_comm_dtype cannot change with buffer pools, whose slots were planned for "
                f"{policy.grad_comm_dtype}. Use allocator='storage_resize', or keep it."
            )
        if not self._context.grads.is_idle:
            raise PolicyChangeError(
                "grad_comm_dtype cannot change while a gradient bucket is live. Change it between "
                "backward passes."
            )
        trained = [(g, g.gradients) for g in self._buckets() if g.gradients is not None]
        dtypes = [
            group_dtypes(bucket.dtypes.compute, wanted, gradients.options, trainable=True)
            for bucket, gradients in trained
        ]
        for (bucket, gradients), new in zip(trained, dtypes, strict=True):
            bucket.dtypes = new
            gradients.set_comm_dtype(new)
        self._policy = wanted

    @contextmanager
    def mixed_precision_context(
        self, mixed_precision_policy: MixedPrecisionPolicy
    ) -> Iterator[None]:
        """`reset_mixed_precision_policy` within the block, the previous policy after it."""
        previous = self._policy
        self.reset_mixed_precision_policy(mixed_precision_policy)
        try:
            yield
        finally:
            self.reset_mixed_precision_policy(previous)

    # --- state --------------------------------------------------------------------------------

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """What DistributedDataParallel asks of a module before it wraps it.

        Raises:
            LifecycleError: it does.
            AttributeError: somebody else, who reads every attribute, as torch.export does.
        """
        if sys._getframe(1).f_globals.get("__name__") != "torch.nn.parallel.distributed":
            raise AttributeError("_ddp_params_and_buffers_to_ignore")
        raise LifecycleError(
            "DistributedDataParallel was about to wrap a sharded model, whose gradients are "
            "averaged over ranks already. Do not wrap it. With accelerate leave it out of "
            "prepare(), or call prepare_model(model, evaluation_mode=True); the Trainer of "
            "transformers always wraps: write the loop yourself (docs/frameworks.md)."
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Refuse moves and casts, with a LifecycleError."""
        del recurse  # there is nothing to recurse into
        refuse_moves(self.parameters(), fn)
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        """Refuse, with a LifecycleError: hooks and buffers would be shared with the copy."""
        raise LifecycleError(
            "the wrapper of a sharded model cannot be copied. Copy the module in it, as in "
            "AveragedModel(model.module), copy its state_dict(), or shard a second module."
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards, also while a unit runs and after a pass that has raised."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name, shard_of(parameter)

    @torch.no_grad()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load whole tensors, or shards of this sharding or torch's, under names of `module.`.

        Main weights take the values in their own dtype; compute weights follow. Rows that torch
        has cut are gathered; nothing else communicates.

        Raises:
            LifecycleError: `assign=True`, which would cut parameters from their buffers.
            StateDictError: with `strict`, missing or unexpected names; always, wrong shapes, or no
                name that fits.
        """
        if assign:
            raise LifecycleError(
                "load_state_dict(assign=True) would replace sharded parameters. Use assign=False."
            )
        result = load_model_state(self, self._buckets(), state_dict, strict=strict)
        self._context.schedule.install(loaded=True)
        return result

    def buckets(self) -> list[BucketFacts]:
        """Every flat buffer with the parameters it holds, the root's first, then unit by unit."""
        return [bucket.facts() for bucket in self._buckets()]

    @cached_property
    def checkpoint_group(self) -> dist.ProcessGroup:
        """All ranks that hold a part of the model. Under tensor parallelism they make it together.

        Raises:
            CapabilityNotBuiltError: ranks hold different experts under equal names.
        """
        dense, *others = self._environment.all_axes
        if any(experts.ranks != dense.ranks for experts in others):
            raise CapabilityNotBuiltError(
                "checkpoints of experts that are spread over ranks are not built: different "
                "experts go by equal names there, and would replace each other. Gather and save "
                "them by rank."
            )
        return dense.group_of_all()

    def sharded_by_original(self) -> dict[int, nn.Parameter]:
        """By id of each original parameter, the shard that stands for it."""
        return {p.original_id: p.sharded for bucket in self._buckets() for p in bucket.parameters}

    @cached_property
    def param_to_name(self) -> dict[torch.Tensor, str]:
        """The name in the bare module of every shard, and of the parameter it stands for."""
        managed = [p for bucket in self._buckets() for p in bucket.parameters]
        return {face: p.names[0] for p in managed for face in (p.sharded, p.raw)}

    def _buckets(self) -> list[Bucket]:
        units = self._context.root, *self._context.units
        return [bucket for unit in units for bucket in unit.buckets]
