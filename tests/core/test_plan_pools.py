"""Plans of buffer pools: every unit fits, and no smaller pool would do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mfsdp_core.errors import ConfigurationError
from mfsdp_core.plan.options import AllocationConfig, Options
from mfsdp_core.plan.pools import Buffer, plan_pool

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
#: One inner list per unit: the (dtype, elements) of its buckets.
UNITS = st.lists(
    st.lists(
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.integers(1, 9)), min_size=1, max_size=4
    ),
    min_size=1,
    max_size=6,
)


def row(unit, bucket, dtype, elements):
    where = (unit, f"{unit}/{bucket}", "grad_bucket", dtype)
    return Buffer(*where, range(1), elements, "reduction")


def requests(units):
    return [
        row(f"u{u}", b, dtype, elements)
        for u, buckets in enumerate(units)
        for b, (dtype, elements) in enumerate(buckets)
    ]


@settings(max_examples=60, deadline=None)
@given(UNITS, st.integers(2, 4))
def test_every_bucket_of_a_max_pool_has_an_area_of_its_own_that_is_large_enough(units, slots):
    plan = plan_pool("max_pool", requests(units), slots)
    assert len(plan.homes) == len(units)
    assert plan.slots == min(slots, len(units))
    for u, buckets in enumerate(units):
        areas = [plan.area_of[row(f"u{u}", b, *bucket)] for b, bucket in enumerate(buckets)]
        assert len(set(areas)) == len(areas)
        for (dtype, elements), area in zip(buckets, areas, strict=True):
            assert plan.areas[area].dtype == dtype
            assert plan.areas[area].elements >= elements


@settings(max_examples=40, deadline=None)
@given(UNITS)
def test_the_bytes_of_a_pool_are_its_slots_times_the_largest_jth_buckets(units):
    plan = plan_pool("max_pool", requests(units), 3)
    expected = 0
    for dtype, item in ITEM_BYTES.items():
        ordered = [sorted((e for d, e in u if d == dtype), reverse=True) for u in units]
        for rank in range(max(map(len, ordered))):
            expected += item * max(sizes[rank] for sizes in ordered if len(sizes) > rank)
    assert plan.size_bytes == plan.slots * expected
    ends = [o + a.size_bytes for o, a in zip(plan.offsets_bytes, plan.areas, strict=True)]
    assert list(plan.offsets_bytes) == [0, *ends[:-1]]


@settings(max_examples=60, deadline=None)
@given(UNITS, st.integers(2, 4))
def test_a_fixed_pool_serves_the_most_frequent_signature_without_waste(units, slots):
    plan = plan_pool("fixed_pool", requests(units), slots)
    signatures = [tuple(sorted(buckets)) for buckets in units]
    served = set(plan.homes)
    assert len(served) == max(signatures.count(s) for s in signatures)
    assert len({signatures[int(unit[1:])] for unit in served}) == 1
    assert {request.unit for request in plan.area_of} == served
    for request in requests(units):
        if request.unit in served:
            assert plan.areas[plan.area_of[request]].elements == request.elements


@settings(max_examples=40, deadline=None)
@given(UNITS, st.integers(2, 4))
def test_neighbouring_units_have_different_homes(units, slots):
    plan = plan_pool("max_pool", requests(units), slots)
    homes = [plan.homes[f"u{u}"] for u in range(len(units))]
    for index in range(len(homes)):
        window = homes[index : index + plan.slots]
        assert len(set(window)) == len(window)


def test_codes_have_areas_of_their_own_in_the_slot_of_the_weights_that_they_become():
    rows = []
    for unit, elements in zip("abc", (8, 6, 8), strict=True):
        rows.append(row(unit, 0, "bfloat16", 8)._replace(role="compute_weights"))
        codes = row(unit, 0, "uint8", elements)
        rows.append(codes._replace(role="payload", payload="codes"))
    assert plan_pool("max_pool", rows, 2).size_bytes == 2 * (8 * 2 + 8)
    assert [*plan_pool("fixed_pool", rows, 2).homes] == ["a", "c"]


def test_a_tie_of_fixed_signatures_goes_to_the_larger_one_then_to_the_first():
    units = [[("float32", 2)], [("float32", 8)], [("bfloat16", 16)]]
    assert [*plan_pool("fixed_pool", requests(units), 2).homes] == ["u1"]


UNIT = {"fsdp_unit_modules": [nn.Linear]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "storage_resize"),
        ({"fsdp_double_buffer": True}, "fixed_pool"),
        ({"fsdp_double_buffer": True, "maxpool_double_buffer": True} | UNIT, "max_pool"),
        ({"allocator": "temporary"}, "temporary"),
        ({"allocator": "max_pool", "fsdp_double_buffer": True}, "max_pool"),
    ],
)
def test_upstreams_flags_and_the_allocator_argument_name_the_same_thing(arguments, expected):
    allocation = Options(**arguments).allocation
    assert allocation == AllocationConfig(expected, 2, persistent_fallback=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"allocator": "arena"}, "expected one of temporary, storage_resize"),
        (
            {"allocator": "temporary", "fsdp_double_buffer": True},
            "contradicts fsdp_double_buffer=True",
        ),
        (
            {"allocator": "fixed_pool", "fsdp_double_buffer": True, "maxpool_double_buffer": True}
            | UNIT,
            "contradicts",
        ),
        ({"maxpool_double_buffer": True} | UNIT, "pass fsdp_double_buffer=True as well"),
        ({"maxpool_double_buffer": True, "nccl_ub": True}, "pass fsdp_unit_modules as well"),
        ({"allocator": "max_pool", "pool_slots": 1}, "needs 2 slots at least"),
        ({"fsdp_db_use_persist_buf_on_alloc_fail": True}, "is none"),
    ],
)
def test_arguments_that_contradict_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        Options(**arguments)
