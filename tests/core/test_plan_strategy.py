"""Strategies as rows of a placement table."""

from __future__ import annotations

import pytest

from mfsdp_core.errors import ConfigurationError
from mfsdp_core.plan.config import ReductionConfig, ScheduleConfig, parse_sharding
from mfsdp_core.plan.strategy import (
    INNER,
    OUTER,
    Collective,
    Landing,
    parse_strategy,
)

#: name: reduction, every microbatch?, landing, way back of the weights, gathered at every use?
EXPECTED = {
    "no_shard": (Collective.ALL_REDUCE, False, Landing.COPY, Collective.NONE, False),
    "optim": (Collective.REDUCE_SCATTER, False, Landing.COPY, Collective.ALL_GATHER, False),
    "optim_grads": (Collective.REDUCE_SCATTER, True, Landing.ADD, Collective.ALL_GATHER, False),
    "optim_grads_params": (
        Collective.REDUCE_SCATTER,
        True,
        Landing.ADD,
        Collective.ALL_GATHER,
        True,
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_row_decides_reduction_landing_and_gathers(name):
    row = INNER[name]
    found = (
        row.reduction,
        row.reduces_every_microbatch,
        row.landing,
        row.weight_refresh,
        row.gathers_every_use,
    )
    assert found == EXPECTED[name]


def test_every_outer_stage_copies_and_runs_once():
    assert {row.landing for row in OUTER.values()} == {Landing.COPY}
    assert not any(row.reduces_every_microbatch for row in OUTER.values())


@pytest.mark.parametrize(("integer", "name"), list(enumerate(EXPECTED)))
def test_integers_and_names_mean_the_same(integer, name):
    assert parse_strategy(integer) == parse_strategy(name)


def test_outer_optimizer_sharding_needs_an_outer_axis():
    with pytest.raises(ConfigurationError, match="there is none"):
        parse_sharding(3, 1, ReductionConfig(), ScheduleConfig(), has_outer_axis=False)
    parse_sharding(3, 1, ReductionConfig(), ScheduleConfig(), has_outer_axis=True)


@pytest.mark.parametrize(("strategy", "allowed"), [(0, True), (1, True), (2, False), (3, False)])
def test_late_reduction_is_only_for_strategies_that_hold_whole_gradients(strategy, allowed):
    schedule = ScheduleConfig(overlap_reduction=False)
    if allowed:
        parse_sharding(strategy, 0, ReductionConfig(), schedule, has_outer_axis=False)
    else:
        with pytest.raises(ConfigurationError, match="overlap_grad_reduce=False"):
            parse_sharding(strategy, 0, ReductionConfig(), schedule, has_outer_axis=False)
