"""Random models: every parameter has one bucket, and every owner is right.

A layout refuses overlaps and cut rows itself (`test_plan_layout.py`). Some hundreds of examples by
default, ten thousand in `make nightly`.
"""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mfsdp_core.plan.grouping import ROOT, BucketPlan, ParameterFacts, plan_buckets

UNITS = ["layers.0", "layers.1", "vision.blocks.3", ROOT]

SIZE = st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 127, 128, 1000, 1024]))
SHAPE = st.lists(SIZE, min_size=0, max_size=4).map(tuple).filter(lambda s: prod(s) < 10**8)


@st.composite
def models(draw: st.DrawFn) -> list[ParameterFacts]:
    """Parameters of up to four units: some tied within or across units, frozen, of other dtypes."""
    parameters = []
    for index in range(draw(st.integers(1, 14))):
        units = draw(st.lists(st.sampled_from(UNITS), min_size=1, max_size=3))
        parameters.append(
            ParameterFacts(
                names=tuple(f"{unit}.p{index}.{number}" for number, unit in enumerate(units)),
                units=tuple(units),
                shape=draw(SHAPE),
                dtype=draw(st.sampled_from(["float32", "bfloat16"])),
                requires_grad=draw(st.integers(0, 3)) > 0,
            )
        )
    return parameters


def check_members(parameters: list[ParameterFacts], plans: list[BucketPlan]) -> None:
    """Every parameter has one bucket, whose members agree in all that buffers are made of."""
    members = [index for plan in plans for index in plan.members]
    assert sorted(members) == list(range(len(parameters)))
    assert len({plan.name for plan in plans}) == len(plans)
    for plan in plans:
        for index in plan.members:
            facts = parameters[index]
            assert (facts.dtype, facts.requires_grad) == (plan.dtype, plan.requires_grad)
            owner = facts.units[0] if len(set(facts.units)) == 1 else ROOT
            assert plan.unit == owner


def check(parameters: list[ParameterFacts], ranks: int) -> None:
    plans = plan_buckets(parameters, ranks)
    check_members(parameters, plans)
    for plan in plans:
        shapes = [parameters[i].shape for i in plan.members]
        assert [slot.shape for slot in plan.layout.slots] == shapes
    assert plan_buckets(list(parameters), ranks) == plans


@settings(max_examples=250, deadline=None)
@given(models(), st.integers(1, 64))
def test_random_models_are_laid_out_within_the_rules(
    parameters: list[ParameterFacts], ranks: int
) -> None:
    check(parameters, ranks)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(models(), st.integers(1, 512))
def test_ten_thousand_random_models_are_laid_out_within_the_rules(
    parameters: list[ParameterFacts], ranks: int
) -> None:
    check(parameters, ranks)
