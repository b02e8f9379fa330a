"""Every argument of the public functions, once: its meaning, its default and what refuses it. Pure.

[Note: divisor] Gradients are divided by the number of *dense* data-parallel ranks, also those of
experts (R11). An expert is shared by fewer ranks, but each of them has already added up, in its
backward pass, the tokens of all the ranks that sent it some.

[Note: one rounding] Sums over ranks are held in `GroupDtypes.reduce`, whatever carries them: a
backend's collectives add up in the dtype of the wire, and a direct exchange in any that holds it.
`auto` exchanges what no collective adds up; `native` refuses it. Where gradients are added up
`by_collectives` alone, the dtype of the wire is the default; NCCL's symmetric kernels then round
less than it says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from mfsdp_core.errors import refuse_configuration
from mfsdp_core.plan.pools import PoolKind
from mfsdp_core.plan.prefetch import OrderName
from mfsdp_core.plan.strategy import Strategy, parse_strategy

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from mfsdp_core.precision.policy import MixedPrecisionPolicy

AllocatorName = Literal["temporary", "storage_resize", "fixed_pool", "max_pool"]
DoubleReduction = Literal["raise", "warn"]
NestedUnits = Literal["outermost", "all"]
Transport = Literal["auto", "native", "point_to_point"]
UnusedParameters = Literal["none", "zero"]

#: In the backward pass a unit is gathered before the one that ran before it is released, and a
#: bucket fills while another is being reduced.
SMALLEST_POOL_SLOTS = 2
DEFAULT_TRANSPORT: Transport = "auto"

_CHOICES = {
    "allocator": AllocatorName,
    "on_double_reduction": DoubleReduction,
    "nested_units": NestedUnits,
    "transport": Transport,
    "unused_parameters": UnusedParameters,
}


@dataclass(frozen=True)
class AllocationConfig:
    """Allocator of compute weights, gradient buckets and buckets of the outer reduction.

    slots: of every pool; other allocators have none. persistent_fallback: units that no slot serves
    get buffers that are never freed, instead of storage that is resized.
    """

    allocator: AllocatorName = "storage_resize"
    slots: int = SMALLEST_POOL_SLOTS
    persistent_fallback: bool = False

    @property
    def pool(self) -> PoolKind | None:
        """The kind of pool, None for allocators that are none."""
        return self.allocator if self.allocator in get_args(PoolKind) else None  # type: ignore[return-value]


@dataclass(frozen=True)
class Options:
    """Names, order and defaults are upstream's; keyword-only ones are this package's own.

    device_mesh, dp_shard_dim: the mesh, and the name of the dimension to shard over (needed where
    the mesh has several); None is a mesh over all ranks. dp_outer_dim, hybrid_fsdp_group: the
    outer data-parallel dimension of hybrid sharding, and a process group over the ranks of both;
    one is refused without the other. Dimensions may be flattened ones, and the mesh may have more.
    tp_dim: the dimension of tensor parallelism, after the others; parameters that are DTensors on
    it, or marked as cut by hand, are sharded further. expt_device_mesh: the same dimensions, of the
    ranks that share an expert; hybrid_fsdp_expt_group and expt_fsdp_group_ag are to it what
    hybrid_fsdp_group and fsdp_group_ag are to device_mesh. Parameters with `allreduce = False`, or
    `.experts.` in their name, are experts'. outer_dp_sharding_strategy: 0 replicates over the outer
    dimension (HSDP), 1 shards the optimizer over it as well (HFSDP). fsdp_group_ag: process group
    over the ranks of the inner dimension for gathers alone. fsdp_unit_modules: classes, or import
    paths of classes, whose instances are sharded as one; what lies outside is the root's.
    zero_dp_strategy: 0 no_shard, 1 optim, 2 optim_grads, 3 optim_grads_params. device: where the
    module goes, None is the mesh's current device. init_model_with_meta_device: parameters on the
    meta device are made, initialised by their modules' reset_parameters and sharded, unit by unit.
    mixed_precision_policy: see `MixedPrecisionPolicy`.
    overlap_grad_reduce: reduce during the backward pass, rather than in `finish_grad_sync`.
    overlap_param_gather: gather the next unit ahead of need. sync_model_each_microbatch: every
    backward pass ends its cycle (auto-sync). average_in_collective: let the collective divide by
    the number of ranks, instead of scaling its input.
    cuda_graph_mode: keep what moves, and the host, out of a step, so that it can be captured (see
    `CapturedStep`); needs a pool, and makes gradients of unused parameters zeros.
    calculate_per_token_loss: sum gradients without dividing, whatever
    average_in_collective says. report_nan_in_param_grad: raise when a parameter's gradient holds
    NaN or Inf, as soon as it is computed; check_for_nan_in_grad: look once per buffer, before it is
    reduced. disable_bucketing: give every parameter a bucket of its own. use_decoupled_grad: attach
    reduced gradients as `decoupled_grad`, in the dtype of main gradients, for an optimizer that
    reads them there; `grad` stays None. on_double_reduction: `warn` restores upstream's behaviour,
    in which a whole gradient reduced twice in a cycle is wrong. transport: `native` collectives, or
    direct exchange by messages with a local FP32 sum, `point_to_point`; `auto` takes one of the
    two (`DataParallelAxes.communicators` has the rule), and `model.transports` says which.
    allocator: who serves the buffers that come and go, one of `temporary`, `storage_resize`,
    `fixed_pool` and `max_pool` (README, Allocators); None is what upstream's flags say:
    `fsdp_double_buffer` the fixed pool, with `maxpool_double_buffer` the max pool, neither
    `storage_resize`. pool_slots: slots of each pool.
    fsdp_db_use_persist_buf_on_alloc_fail: units that no slot serves keep their buffers, instead of
    resizing their storage. keep_fp8_transpose_cache: of weights that Transformer Engine keeps as
    codes, keep the transposes between uses.
    enable_fine_grained_param_gather: gather a unit's buckets module by module, as modules run that
    need them, rather than at the start of the unit (README, Gathering by module).
    prefetch_order: the order in which units are expected to run: as the first complete pass ran
    them (`recorded`), as they are registered (`static`), or their names in the order given.
    prefetch_budget_bytes: gather units ahead as long as those that have not run yet stay within it;
    None is the next unit. nccl_ub: allocate what collectives use in memory of NCCL's and register
    it, as symmetric windows unless disable_symmetric_registration says plain buffers; implies
    fsdp_double_buffer, and sums with local scaling instead of averages. What a group did not get is
    warned of, and in `buffer_registration` of the model. manual_registration: leave registering to
    the caller, who calls `param_and_grad_buffer.manual_buffer_registration()` once, after the first
    iteration. nested_units: of nested matches of fsdp_unit_modules the outermost, or all.
    offload: keep main weights, reduced gradients and so the optimizer's state in host memory, which
    is pinned for CUDA; weights are copied to the device as they are gathered, gradients back as
    they are final.
    unused_parameters: gradient of a parameter that no rank has used in a cycle: `none` as in plain
    torch, so that optimizers leave it alone, which ranks find out by one small reduction per cycle;
    `zero` without it.

    Raises:
        ConfigurationError: an argument, or a combination, that cannot mean anything.
    """

    device_mesh: DeviceMesh | None = None
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: dist.ProcessGroup | None = None
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: dist.ProcessGroup | None = None
    expt_fsdp_group_ag: dist.ProcessGroup | None = None
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None
    zero_dp_strategy: int | str = 3
    outer_dp_sharding_strategy: int | str = 0
    device: torch.device | str | int | None = None
    init_model_with_meta_device: bool = False
    mixed_precision_policy: MixedPrecisionPolicy = field(
        default_factory=lambda: _policy_class()()  # noqa: PLW0108 - made when it is known
    )
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    sync_model_each_microbatch: bool = True
    preproc_state_dict_for_dcp_ckpt: bool = True
    report_nan_in_param_grad: bool = False
    average_in_collective: bool = False
    disable_bucketing: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    disable_symmetric_registration: bool = False
    enable_fine_grained_param_gather: bool = False
    use_decoupled_grad: bool = False
    cuda_graph_mode: bool = False
    maxpool_double_buffer: bool = False
    _: KW_ONLY
    on_double_reduction: DoubleReduction = "raise"
    transport: Transport = DEFAULT_TRANSPORT
    allocator: AllocatorName | None = None
    pool_slots: int = SMALLEST_POOL_SLOTS
    prefetch_order: OrderName | Sequence[str] = "recorded"
    prefetch_budget_bytes: int | None = None
    check_for_nan_in_grad: bool = False
    nested_units: NestedUnits = "outermost"
    manual_registration: bool = False
    unused_parameters: UnusedParameters = "none"
    offload: bool = False

    #: Gradients that are final are added to by further passes of the cycle, also where an outer
    #: axis has reduced them.
    reopens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check values and combinations."""
        refuse_configuration(self._refusals())

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Dtype in which modules compute with a parameter that is given as `stored`: the same."""
        return stored

    @cached_property
    def strategy(self) -> Strategy:
        """What is sharded along both axes."""
        return parse_strategy(self.zero_dp_strategy, self.outer_dp_sharding_strategy)

    @cached_property
    def allocation(self) -> AllocationConfig:
        """Who serves the buffers that come and go."""
        return AllocationConfig(
            self._implied_allocator if self.allocator is None else self.allocator,
            self.pool_slots,
            # What no slot serves must stay where it is as well, where a step is captured.
            self.fsdp_db_use_persist_buf_on_alloc_fail or self.cuda_graph_mode,
        )

    @property
    def by_collectives(self) -> bool:
        """Whether the backend's own collectives, and nothing else, add up gradients."""
        return self.nccl_ub or self.cuda_graph_mode

    @property
    def exchanges(self) -> bool:
        """Whether ranks may add up by themselves, in a dtype that holds more than the wire's."""
        return self.transport != "native" and not self.by_collectives

    @property
    def averages(self) -> bool:
        """Whether collectives take the mean over their own ranks.

        Symmetric kernels add up; an average would run another kernel.
        """
        sums = self.calculate_per_token_loss or self.registers_windows
        return self.average_in_collective and not sums

    @property
    def registers_windows(self) -> bool:
        """Whether memory is registered as symmetric windows."""
        return self.nccl_ub and not self.disable_symmetric_registration

    @property
    def tells_use(self) -> bool:
        """Whether ranks tell each other which parameters they have used."""
        # A graph knows no None: gradients are there at every replay, as under upstream.
        return self.unused_parameters == "none" and not self.cuda_graph_mode

    def input_scale(self, own_ranks: int, dense_ranks: int) -> float:
        """Factor on what enters a reduction over `own_ranks` ranks: see [Note: divisor]."""
        if self.calculate_per_token_loss:
            return 1.0
        return (own_ranks if self.averages else 1) / dense_ranks

    @property
    def _implied_allocator(self) -> AllocatorName:
        """What the flags say."""
        if self.maxpool_double_buffer:
            return "max_pool"
        return "fixed_pool" if self.fsdp_double_buffer or self.nccl_ub else "storage_resize"

    def _refusals(self) -> Iterator[tuple[object, str]]:
        yield (
            not isinstance(self.mixed_precision_policy, _policy_class()),
            "mixed_precision_policy: expected mfsdp_core.MixedPrecisionPolicy, found "
            f"{type(self.mixed_precision_policy).__name__}.",
        )
        for name, choices in _CHOICES.items():
            given, is_open = getattr(self, name), name == "allocator"
            yield (
                given not in get_args(choices) and not (is_open and given is None),
                f"{name}={given!r}: expected one of {', '.join(get_args(choices))}.",
            )
        for switch in (own.name for own in fields(self) if own.type == "bool"):
            given = getattr(self, switch)
            yield not isinstance(given, bool), f"{switch}={given!r}: expected True or False."
        yield from self._refused_allocation()
        strategy = self.strategy
        yield (
            strategy.outer.shards_optimizer and self.dp_outer_dim is None,
            f"outer_dp_sharding_strategy={strategy.outer_name!r} shards over an outer axis, and "
            "there is none. Pass dp_outer_dim and hybrid_fsdp_group, or leave it at 0.",
        )
        yield (
            not self.overlap_grad_reduce and strategy.inner.reduces_every_microbatch,
            "overlap_grad_reduce=False keeps gradients whole until finish_grad_sync, which "
            f"{strategy.inner_name!r} has no buffer for. Use zero_dp_strategy 0 or 1, or "
            "overlap_grad_reduce=True.",
        )
        yield (
            self.enable_fine_grained_param_gather and self.prefetch_budget_bytes is not None,
            f"prefetch_budget_bytes={self.prefetch_budget_bytes} counts whole units, and "
            "enable_fine_grained_param_gather gathers what the next module needs. Leave one of "
            "them at its default.",
        )
        for name, given, why in (
            ("nccl_ub", self.nccl_ub, "registers device memory that never moves"),
            ("use_decoupled_grad", self.use_decoupled_grad, "is for optimizers of the device"),
            (
                "weight_codec",
                self.mixed_precision_policy.weight_codec is not None,
                "makes codes from main weights on the device",
            ),
            (
                "on_double_reduction='warn'",
                self.on_double_reduction == "warn",
                "adds to a gradient that has left the device",
            ),
        ):
            yield (
                self.offload and given,
                f"offload=True keeps main weights and gradients in host memory, and {name} {why}. "
                "Leave one of them out.",
            )
        reasons = [reason for holds, reason in self._uncapturable() if holds]
        yield (
            self.cuda_graph_mode and reasons,
            f"cuda_graph_mode=True captures a step once and replays it. {'. '.join(reasons)}.",
        )

    def _refused_allocation(self) -> Iterator[tuple[object, str]]:
        chosen, implied = self.allocation.allocator, self._implied_allocator
        yield (
            self.nccl_ub and self.transport == "point_to_point",
            f"nccl_ub registers memory for NCCL's collectives, and transport={self.transport!r} "
            "uses none. Use transport='native'.",
        )
        doubles = self.fsdp_double_buffer or self.nccl_ub
        missing = [] if doubles else ["fsdp_double_buffer=True"]
        missing += [] if self.fsdp_unit_modules else ["fsdp_unit_modules"]
        yield (
            self.maxpool_double_buffer and missing,
            "maxpool_double_buffer=True gives units the slots of double buffers: pass"
            f" {' and '.join(missing)} as well.",
        )
        yield (
            implied not in {"storage_resize", chosen} and not (chosen == "max_pool" and doubles),
            f"allocator={chosen!r} contradicts fsdp_double_buffer={doubles} (or nccl_ub), "
            f"maxpool_double_buffer={self.maxpool_double_buffer}, which mean {implied!r}. Give one "
            "of them.",
        )
        is_pool = self.allocation.pool is not None
        yield (
            is_pool and self.pool_slots < SMALLEST_POOL_SLOTS,
            f"pool_slots={self.pool_slots}: a pool needs {SMALLEST_POOL_SLOTS} slots at least, one "
            "for the unit that runs and one for its neighbour.",
        )
        yield (
            self.fsdp_db_use_persist_buf_on_alloc_fail and not is_pool,
            "fsdp_db_use_persist_buf_on_alloc_fail=True is about units that no slot of a pool "
            f"serves, and allocator={chosen!r} is none. Use fsdp_double_buffer=True, or leave it.",
        )

    def _uncapturable(self) -> Iterator[tuple[object, str]]:
        """What reads memory on the host, or lets buffers move, within a step."""
        yield (
            self.allocation.pool is None,
            f"allocator={self.allocation.allocator!r} gives buffers back and gets others; use "
            "fsdp_double_buffer=True",
        )
        yield self.offload, "offload: the host waits for gradients; leave it out"
        yield (
            self.report_nan_in_param_grad or self.check_for_nan_in_grad,
            "report_nan_in_param_grad and check_for_nan_in_grad read gradients on the host; look "
            "at the loss between steps instead",
        )
        yield (
            self.transport == "point_to_point",
            f"transport={self.transport!r} exchanges messages from the host; use 'native'",
        )
        yield (
            self.mixed_precision_policy.weight_codec is not None,
            "weight_codec: recipes were never captured",
        )
        yield (
            self.registers_windows,
            "nccl_ub with symmetric windows: graphs of symmetric kernels are known to be "
            "unreliable (NVIDIA/Megatron-LM#6154); add disable_symmetric_registration=True",
        )
        yield (
            self.nccl_ub and self.manual_registration,
            "manual_registration registers memory after the first steps; leave it out",
        )


def _policy_class() -> type[MixedPrecisionPolicy]:
    """Loaded when options are made: their names and defaults can be read without torch."""
    from mfsdp_core.precision.policy import MixedPrecisionPolicy

    return MixedPrecisionPolicy
