"""Slow-downs put into a copy of the core: a gate of one run finds each, by the metric it moves."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from bench.validate.patched_core import copy_of_core

SLOW_DOWNS = Path(__file__).parent / "slow_downs"


@pytest.mark.parametrize("patch", sorted(SLOW_DOWNS.glob("*.patch")), ids=lambda patch: patch.stem)
def test_a_slow_down_still_fits_the_source(tmp_path, patch):
    copy_of_core(tmp_path, patch)  # raises where it does not


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_slow_down_is_found_by_a_gate_of_one_run_and_unchanged_code_passes(tmp_path):
    slow_downs = runpy.run_path(str(SLOW_DOWNS / "__main__.py"))
    expected = {
        "a-copy": "copies",
        "a-gather-twice": "collectives",
        "a-kept-copy": "live_storage",
        "a-loop-over-parameters": "python_calls",
        "a-loop-that-calls-nothing": "python_lines",
        "a-lost-fusion": "operations",
        "a-lost-overlap": "exposed_waits",
        "a-sleep": "waits",
        "a-synchronous-wait": "exposed_waits",
        "a-wider-wire-dtype": "collective_bytes",
        "an-allocation-per-unit": "allocations",
        "an-extra-cast": "copies",
    }
    found = slow_downs["gated"](tmp_path / "work", [*expected, "unchanged"])
    assert set(expected) == set(slow_downs["slow_downs"]())
    for name, metric in expected.items():
        assert metric in slow_downs["found_by"](found[name]), name
    assert slow_downs["found_by"](found["unchanged"]) == {}
