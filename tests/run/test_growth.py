"""The curves of `benchmarks.growth`: sizes that run, and what they are called."""

from __future__ import annotations

import math

import pytest

from bench.resolve.parameter_facts import parameter_facts
from benchmarks import growth

SIZES = {"10M": 10e6, "34M": 34e6, "100M": 100e6, "300M": 300e6}


@pytest.mark.parametrize("curve", growth.CURVES)
def test_every_size_of_a_curve_can_run_under_all_its_engines(curve: str) -> None:
    for size, model, ranks in growth.CURVES[curve]:
        for engine in growth.ENGINES.get(curve, growth.PLAIN):
            run = growth.run_of(model, engine, ranks)
            assert run.launch.ranks == ranks
            assert run.shape is not None
            if curve == "units":
                assert run.shape.layers == int(size)
            if curve == "parameters":
                facts = parameter_facts(run.shape, "fp32")
                count = sum(math.prod(fact.shape) for fact in facts)
                assert count == pytest.approx(SIZES[size], rel=0.1)


def test_a_row_says_ratios_to_the_first_engine() -> None:
    steps = [{"wall_milliseconds": w, "cpu_milliseconds": c} for w, c in ((200, 100), (100, 75))]
    row = {"units": "4", "ranks": 2, "steps": steps}
    assert growth.line(row, "units").endswith("100.0 (   75.0) ms 0.50 (0.75)")
    assert "does not fit" in growth.line({**row, "left_out": "does not fit"}, "units")
