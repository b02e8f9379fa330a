"""Ownership and buckets, as pure functions of parameter facts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mfsdp_core.plan.dtype_policy import resolve_dtypes
from mfsdp_core.plan.grouping import ROOT, ParameterFacts, owner_of, plan_buckets
from mfsdp_core.plan.prefetch import PrefetchOrder

FACTS = st.builds(
    ParameterFacts,
    names=st.just(("p",)),
    units=st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=3).map(tuple),
    shape=st.lists(st.integers(1, 20), max_size=3).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    requires_grad=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(FACTS, max_size=20), st.integers(1, 8))
def test_every_parameter_has_exactly_one_bucket_that_agrees_with_it(parameters, slices):
    plans = plan_buckets(parameters, slices)
    assert sorted(i for plan in plans for i in plan.members) == list(range(len(parameters)))
    assert len({plan.name for plan in plans}) == len(plans)
    for plan in plans:
        for index in plan.members:
            facts = parameters[index]
            assert (plan.dtype, plan.requires_grad) == (facts.dtype, facts.requires_grad)
            assert plan.unit == owner_of(facts.units)


def test_a_tie_across_units_belongs_to_the_root():
    assert owner_of(["a", "b"]) == ROOT
    assert owner_of(["a", "a"]) == "a"
    assert owner_of(["a", ROOT]) == ROOT


def test_what_the_root_owns_before_and_behind_the_units_lies_in_buckets_of_its_own():
    facts = [
        ParameterFacts((name,), (unit,), (4,), "float32", requires_grad=True)
        for name, unit in [
            ("embedding", ""),
            ("units.0.w", "units.0"),
            ("units.1.w", "units.1"),
            ("norm", ""),
            ("head", ""),
        ]
    ]
    of_root = [plan for plan in plan_buckets(facts, 2) if plan.unit == ROOT]
    found = [(plan.name, plan.members) for plan in of_root]
    assert found == [("(root)/0", (0,)), ("(root)/1", (3, 4))]
    no_units = plan_buckets([facts[0], facts[3]], 2)
    assert [plan.members for plan in no_units] == [(0, 1)]


def test_dtypes_left_open_follow_the_compute_dtype_and_each_other():
    resolved = resolve_dtypes("bf16", "fp32", None, None)
    assert (resolved.main_params, resolved.main_grads, resolved.grad_comm) == (
        "fp32",
        "bf16",
        "bf16",
    )
    assert resolve_dtypes("bf16", None, None, None).shares_weights
    assert resolve_dtypes("fp32", "fp32", "fp32", "bf16").needs_comm_buffer
    assert resolved.casts_gradient


def following(order, unit, direction):
    return next(order.upcoming(unit, direction), None)


def test_units_are_expected_in_registration_order_until_a_pass_was_recorded():
    order = PrefetchOrder(3)
    assert following(order, None, "forward") == 0
    assert following(order, None, "backward") == 2
    assert following(order, 1, "forward") == 2
    for unit in (2, 0, 0, 1):
        order.observe(unit)
    order.finish_pass()
    assert following(order, None, "forward") == 2
    assert [following(order, unit, "forward") for unit in (2, 0, 1)] == [0, 1, None]
    assert [following(order, unit, "backward") for unit in (1, 0, 2)] == [0, 2, None]


def test_a_pass_that_skipped_a_unit_is_not_recorded():
    order = PrefetchOrder(2)
    order.observe(1)
    order.finish_pass()
    assert following(order, None, "forward") == 0


def test_a_model_without_units_prefetches_nothing():
    assert following(PrefetchOrder(0), None, "forward") is None
    assert following(PrefetchOrder(0), None, "backward") is None
