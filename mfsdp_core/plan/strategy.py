"""Sharding strategies as data: the only file of the core that knows their names.

A strategy says, for each data-parallel mesh axis, where the parameter, the gradient accumulator,
the reduced gradient and the optimizer state live. Everything the runtime does follows from these
placements, never from the strategy's name and never from the size of a group: a group of one scales
and lands like any other, only without a collective.

    placement   meaning on an axis of N ranks
    REPLICATE   every rank holds the whole, equal
    PARTIAL     every rank holds the whole, and the sum over ranks is the value
    FLAT        rank r holds slice r of the flat buffer
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from mfsdp_core.errors import ConfigurationError


class Placement(Enum):
    """Where a flat buffer lives along one mesh axis."""

    REPLICATE = "replicate"
    PARTIAL = "partial"
    FLAT = "flat"


class Collective(Enum):
    """What moves a buffer from one placement to another."""

    NONE = "none"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"


_TRANSITIONS: dict[tuple[Placement, Placement], Collective] = {
    (Placement.REPLICATE, Placement.REPLICATE): Collective.NONE,
    (Placement.FLAT, Placement.FLAT): Collective.NONE,
    (Placement.REPLICATE, Placement.FLAT): Collective.NONE,
    (Placement.FLAT, Placement.REPLICATE): Collective.ALL_GATHER,
    (Placement.PARTIAL, Placement.REPLICATE): Collective.ALL_REDUCE,
    (Placement.PARTIAL, Placement.FLAT): Collective.REDUCE_SCATTER,
}


def collective_between(now: Placement, wanted: Placement) -> Collective:
    """The collective that turns `now` into `wanted`.

    Raises:
        ConfigurationError: no collective does it (a value cannot become PARTIAL again).
    """
    try:
        return _TRANSITIONS[now, wanted]
    except KeyError:
        raise ConfigurationError(
            f"no collective turns a {now.value} buffer into a {wanted.value} one"
        ) from None


@dataclass(frozen=True)
class AxisPlacements:
    """Placements along one mesh axis.

    parameter: compute weights at rest. accumulator: the persistent gradient between microbatches.
    gradient: what the optimizer is handed. optimizer: main weights and optimizer state.
    """

    parameter: Placement
    accumulator: Placement
    gradient: Placement
    optimizer: Placement

    @cached_property
    def reduction(self) -> Collective:
        """The collective that a freshly computed (PARTIAL) gradient goes through."""
        return collective_between(Placement.PARTIAL, self.gradient)

    @cached_property
    def reduces_every_microbatch(self) -> bool:
        """Whether the accumulator has no room for an un-reduced gradient."""
        return self.accumulator is not Placement.PARTIAL

    @cached_property
    def weight_refresh(self) -> Collective:
        """The collective that brings updated main weights into compute weights at rest or in use.

        Compute needs the whole parameter, so this is the way from the optimizer's placement to
        REPLICATE, whether it is walked once per cycle (parameter REPLICATE) or per use (FLAT).
        """
        return collective_between(self.optimizer, Placement.REPLICATE)

    @property
    def shards_optimizer(self) -> bool:
        """Whether a rank updates only its slice of the main weights."""
        return self.optimizer is Placement.FLAT

    @property
    def gathers_every_use(self) -> bool:
        """Whether compute weights are freed between uses."""
        return self.parameter is Placement.FLAT


_R, _P, _F = Placement.REPLICATE, Placement.PARTIAL, Placement.FLAT

#: Rows by name, in the order of upstream's integers 0 to 3.
INNER: dict[str, AxisPlacements] = {
    "no_shard": AxisPlacements(parameter=_R, accumulator=_P, gradient=_R, optimizer=_R),
    "optim": AxisPlacements(parameter=_R, accumulator=_P, gradient=_F, optimizer=_F),
    "optim_grads": AxisPlacements(parameter=_R, accumulator=_F, gradient=_F, optimizer=_F),
    "optim_grads_params": AxisPlacements(parameter=_F, accumulator=_F, gradient=_F, optimizer=_F),
}

#: Rows of the outer axis. Its reduction runs once, on the last microbatch, and always copies: the
#: accumulator keeps the inner-reduced sum of this outer rank, PARTIAL along the outer axis.
OUTER: dict[str, AxisPlacements] = {name: INNER[name] for name in ("no_shard", "optim")}


@dataclass(frozen=True)
class Strategy:
    """One row per mesh axis. Built by `parse_strategy`."""

    inner_name: str
    outer_name: str
    inner: AxisPlacements
    outer: AxisPlacements


def parse_strategy(inner: int | str, outer: int | str = "no_shard") -> Strategy:
    """Rows for `zero_dp_strategy` and `outer_dp_sharding_strategy`, each an integer or a name.

    Raises:
        ConfigurationError: an unknown strategy, or outer optimizer sharding over an inner axis that
            does not shard the optimizer, which the placements cannot express.
    """
    inner_name = _name("zero_dp_strategy", inner, INNER)
    outer_name = _name("outer_dp_sharding_strategy", outer, OUTER)
    strategy = Strategy(inner_name, outer_name, INNER[inner_name], OUTER[outer_name])
    if strategy.outer.shards_optimizer and not strategy.inner.shards_optimizer:
        raise ConfigurationError(
            f"outer_dp_sharding_strategy={outer_name!r} shards the optimizer over the outer axis, "
            f"which needs an inner strategy that shards it too; found {inner_name!r}. "
            "Use zero_dp_strategy 1, 2 or 3, or outer_dp_sharding_strategy 0."
        )
    return strategy


def _name(argument: str, value: int | str, rows: dict[str, AxisPlacements]) -> str:
    names = list(rows)
    if isinstance(value, str) and value in rows:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return names[value]
    choices = ", ".join(f"{index} or {name!r}" for index, name in enumerate(names))
    raise ConfigurationError(f"{argument}={value!r} is not a strategy; expected {choices}")
