"""What is gathered ahead: a pure decision that respects order, budget, slots and recomputation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mfsdp_core.errors import ConfigurationError
from mfsdp_core.plan.prefetch import (
    PrefetchLimits,
    Residents,
    gather_ahead,
    unit_order,
)

UNITS = 6
PLACES = st.integers(0, UNITS - 1)


@st.composite
def situations(draw):
    """Arguments of a decision: what comes, sizes, limits and what is resident."""
    upcoming = draw(st.permutations(range(UNITS)))[: draw(st.integers(0, UNITS))]
    slots = draw(st.none() | st.integers(2, 4))
    taken = slots or 0
    known = draw(st.dictionaries(PLACES, st.integers(0, max(0, taken - 1))))
    residents = Residents(
        gathered=draw(st.frozensets(PLACES)),
        ahead_bytes=draw(st.integers(0, 40)),
        pooled=draw(st.frozensets(PLACES)) if slots else frozenset(),
        slots=known if slots else {},
        holding=frozenset(draw(st.sets(st.integers(0, max(0, taken - 1)))))
        if slots
        else frozenset(),
    )
    sizes = draw(st.lists(st.integers(1, 20), min_size=UNITS, max_size=UNITS))
    limits = PrefetchLimits(draw(st.none() | st.integers(0, 80)), slots)
    return upcoming, sizes, limits, residents


def decide(situation, *, from_unit: bool = True, recomputing: bool = False):
    return gather_ahead(*situation, from_unit=from_unit, recomputing=recomputing)


@settings(max_examples=150, deadline=None)
@given(situations(), st.booleans())
def test_nothing_is_gathered_ahead_while_activations_are_recomputed(situation, from_unit):
    assert decide(situation, from_unit=from_unit, recomputing=True) == []


@settings(max_examples=150, deadline=None)
@given(situations())
def test_the_root_triggers_nothing_where_a_pool_is_fixed(situation):
    chosen = decide(situation, from_unit=False)
    limits = situation[2]
    assert chosen == ([] if limits.slots is not None else decide(situation))


@settings(max_examples=300, deadline=None)
@given(situations())
def test_units_are_chosen_in_turn_and_none_that_is_there_already(situation):
    upcoming, _, _, residents = situation
    chosen = decide(situation)
    absent = [unit for unit in upcoming if unit not in residents.gathered]
    assert chosen == absent[: len(chosen)]


@settings(max_examples=300, deadline=None)
@given(situations())
def test_what_has_not_run_yet_stays_within_the_budget(situation):
    _, sizes, limits, residents = situation
    chosen = decide(situation)
    if limits.budget_bytes is None:
        assert len(chosen) <= 1
    elif chosen:
        assert residents.ahead_bytes + sum(sizes[u] for u in chosen) <= limits.budget_bytes


@settings(max_examples=300, deadline=None)
@given(situations())
def test_every_chosen_unit_of_a_pool_has_an_idle_slot_of_its_own(situation):
    _, _, limits, residents = situation
    chosen = [unit for unit in decide(situation) if unit in residents.pooled]
    if limits.slots is None or not chosen:
        return
    assert len(residents.holding) + len(chosen) <= limits.slots
    kept = [residents.slots[unit] for unit in chosen if unit in residents.slots]
    assert len(set(kept)) == len(kept)
    assert not residents.holding & set(kept)


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(UNITS)), st.lists(st.integers(1, 9), min_size=UNITS, max_size=UNITS))
def test_a_budget_for_everything_gathers_everything(upcoming, sizes):
    limits = PrefetchLimits(budget_bytes=sum(sizes))
    chosen = gather_ahead(upcoming, sizes, limits, Residents(), from_unit=True, recomputing=False)
    assert chosen == upcoming


def test_an_order_is_given_by_the_names_of_all_units():
    names = ["a", "b", "c"]
    assert unit_order(("c", "a", "b"), names) == [2, 0, 1]
    assert unit_order("recorded", names) is None
    with pytest.raises(ConfigurationError, match="expected 'recorded', 'static'"):
        unit_order("reversed", names)
    with pytest.raises(ConfigurationError, match=r"Missing: b; unknown: d; given 3 names of 3"):
        unit_order(["a", "c", "d"], names)
