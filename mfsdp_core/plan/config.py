"""The flat arguments of the public functions, parsed at once into frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mfsdp_core.errors import ConfigurationError
from mfsdp_core.plan.allocation import AllocationConfig
from mfsdp_core.plan.strategy import Strategy

Transport = Literal["auto", "native", "point_to_point"]
DEFAULT_TRANSPORT: Transport = "auto"
UnusedParameters = Literal["none", "zero"]


@dataclass(frozen=True)
class ReductionConfig:
    """How gradients are averaged.

    transport: `native`, `point_to_point` or `auto`, whose rule is in
    `DataParallelAxes.communicators`.
    average_in_collective: let the collective divide instead of scaling its input.
    per_token: do not divide at all; the caller scales by the number of tokens. It wins over
    average_in_collective, as it does upstream.
    unused: gradient of a parameter that no rank has used in a cycle, None or zeros.
    by_collectives: gradients are added up by the backend's own collectives and nothing else, since
    their memory is registered or they are captured.
    reopens: gradients that are final are added to by further passes of the cycle, also where an
    outer axis has reduced them.
    decoupled: hand the result over as `decoupled_grad`, in its own dtype, and leave `grad` None.

    [Note: divisor] Gradients are divided by the number of *dense* data-parallel ranks, also those
    of experts (R11). An expert is shared by fewer ranks, but each of them has already added up, in
    its backward pass, the tokens of all the ranks that sent it some.

    [Note: one rounding] Sums over ranks are held in `GroupDtypes.reduce`, whatever carries them: a
    backend's collectives add up in the dtype of the wire, and a direct exchange in any that holds
    it. `auto` exchanges what no collective adds up; `native` refuses it. Where `by_collectives`,
    the dtype of the wire is the default; NCCL's symmetric kernels then round less than it says.
    """

    average_in_collective: bool = False
    per_token: bool = False
    transport: Transport = DEFAULT_TRANSPORT
    decoupled: bool = False
    unused: UnusedParameters = "none"
    by_collectives: bool = False
    reopens: bool = False

    @property
    def asks_use(self) -> bool:
        """Whether ranks tell each other which parameters they have used."""
        return self.unused == "none"

    @property
    def exchanges(self) -> bool:
        """Whether ranks may add up by themselves, in a dtype that holds more than the wire's."""
        return self.transport != "native" and not self.by_collectives

    @property
    def averages(self) -> bool:
        """Whether collectives take the mean over their own ranks."""
        return self.average_in_collective and not self.per_token

    def input_scale(self, own_ranks: int, dense_ranks: int) -> float:
        """Factor on what enters a reduction over `own_ranks` ranks: see [Note: divisor]."""
        if self.per_token:
            return 1.0
        return (own_ranks if self.averages else 1) / dense_ranks


@dataclass(frozen=True)
class ScheduleConfig:
    """What runs ahead or beside the computation.

    prefetch: gather the next unit while this one computes. overlap_reduction: reduce during the
    backward pass, rather than in `finish_grad_sync`. auto_sync: treat every backward pass as the
    last of its cycle. strict_reduction: raise, rather than warn, on a second reduction.
    prefetch_order: `recorded`, `static`, or the names of all units. prefetch_budget_bytes: of what
    is gathered ahead; None is the next unit. gather_by_module: gather when a module of a unit runs
    what it needs, rather than all of the unit at its start.
    """

    prefetch: bool = True
    overlap_reduction: bool = True
    auto_sync: bool = True
    strict_reduction: bool = True
    prefetch_order: str | tuple[str, ...] = "recorded"
    prefetch_budget_bytes: int | None = None
    gather_by_module: bool = False


@dataclass(frozen=True)
class ShardingConfig:
    """Everything that decides behaviour, apart from modules, meshes and dtypes.

    bucketing: parameters of a unit travel together; without it each one has a bucket of its own.
    checks_each_parameter, checks_before_reduction: where to look for NaN and Inf, in each
    parameter's gradient and in each buffer to be reduced.
    keeps_transposes: of weights that Transformer Engine keeps as codes, between uses.
    has_outer_axis: the mesh has one. has_codec: weights travel through one of the caller's.
    is_captured: a step is captured once and replayed, as a CUDA graph.

    Raises:
        ConfigurationError: unknown names, or combinations that cannot work.
    """

    strategy: Strategy
    reduction: ReductionConfig
    schedule: ScheduleConfig
    allocation: AllocationConfig
    bucketing: bool = True
    checks_each_parameter: bool = False
    checks_before_reduction: bool = False
    keeps_transposes: bool = False
    has_outer_axis: bool = False
    has_codec: bool = False
    is_captured: bool = False

    def __post_init__(self) -> None:
        """Check names and combinations."""
        strategy, reduction, schedule = self.strategy, self.reduction, self.schedule
        transport: str = reduction.transport
        if transport not in get_args(Transport):
            raise ConfigurationError(
                f"transport={transport!r}: expected one of {', '.join(get_args(Transport))}."
            )
        if reduction.unused not in get_args(UnusedParameters):
            raise ConfigurationError(
                f"unused_parameters={reduction.unused!r}: expected one of "
                f"{', '.join(get_args(UnusedParameters))}."
            )
        if strategy.outer.shards_optimizer and not self.has_outer_axis:
            raise ConfigurationError(
                f"outer_dp_sharding_strategy={strategy.outer_name!r} shards over an outer axis, "
                "and there is none. Pass dp_outer_dim and hybrid_fsdp_group, or leave it at 0."
            )
        if not schedule.overlap_reduction and strategy.inner.reduces_every_microbatch:
            raise ConfigurationError(
                f"overlap_grad_reduce=False keeps gradients whole until finish_grad_sync, which "
                f"{strategy.inner_name!r} has no buffer for. Use zero_dp_strategy 0 or 1, or "
                "overlap_grad_reduce=True."
            )
        if schedule.gather_by_module and schedule.prefetch_budget_bytes is not None:
            raise ConfigurationError(
                f"prefetch_budget_bytes={schedule.prefetch_budget_bytes} counts whole units, and "
                "enable_fine_grained_param_gather gathers what the next module needs. Leave one "
                "of them at its default."
            )
        uncapturable = self._uncapturable() if self.is_captured else []
        if uncapturable:
            raise ConfigurationError(
                f"cuda_graph_mode=True captures a step once and replays it. "
                f"{'. '.join(uncapturable)}."
            )

    def _uncapturable(self) -> list[str]:
        """What reads memory on the host, or lets buffers move, within a step."""
        registration, transport = self.allocation.registration, self.reduction.transport
        reasons = {
            f"allocator={self.allocation.allocator!r} gives buffers back and gets others; use "
            "fsdp_double_buffer=True (or maxpool_double_buffer=True)": (
                self.allocation.pool is None
            ),
            "report_nan_in_param_grad and check_for_nan_in_grad read gradients on the host; look "
            "at the loss between steps instead": (
                self.checks_each_parameter or self.checks_before_reduction
            ),
            f"transport={transport!r} exchanges messages from the host; use 'native'": (
                transport == "point_to_point"
            ),
            "weight_codec: recipes were never captured": self.has_codec,
            "nccl_ub with symmetric windows: graphs of symmetric kernels are known to be "
            "unreliable (NVIDIA/Megatron-LM#6154); add disable_symmetric_registration=True": (
                registration is not None and registration.symmetric
            ),
            "manual_registration registers memory after the first steps; leave it out": (
                registration is not None and registration.manual
            ),
        }
        return [reason for reason, holds in reasons.items() if holds]
