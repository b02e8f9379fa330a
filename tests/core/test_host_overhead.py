"""Host overhead of hooks and schedule beside FSDP2's, on torch's fake process group."""

from __future__ import annotations

import warnings

import pytest

from tools.host_overhead import CASES, measure

pytestmark = pytest.mark.usefixtures("fake_group")
FAKE = (0, 4)
MOST = {"zero3": 0.27, "recompute": 0.288, "hsdp": 0.292}


@pytest.mark.parametrize("case", CASES)
def test_a_unit_costs_the_host_less_than_three_tenths_of_the_calls_of_fsdp2(case: str) -> None:
    """And a unit of many costs no more calls than a unit of few."""
    warnings.simplefilter("ignore")  # torch's own, of FSDP2
    few, many = (measure(case, units, rounds=1) for units in (8, 32))
    assert few["mfsdp"].calls > 50  # it was there at all
    assert few["ratio"].calls <= MOST[case]
    assert many["mfsdp"].calls <= few["mfsdp"].calls
