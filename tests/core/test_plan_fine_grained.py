"""The rule that decides on gathering by module where nobody has said."""

from __future__ import annotations

import pytest

from bench.resolve.resolution import resolve_anywhere
from bench.spec import EngineSpec, RunSpec
from mfsdp_core.plan.recipes import gathers_by_module


@pytest.mark.parametrize(
    ("weights", "recomputes", "expected"),
    [
        ("mxfp8", True, True),
        ("mxfp8", False, False),
        ("float8_e4m3fn", True, False),
        ("bf16", True, False),
    ],
)
def test_two_payloads_that_are_both_needed_in_backward_are_gathered_by_module(
    weights: str, recomputes: bool, expected: bool
) -> None:
    assert gathers_by_module(weights, recomputes=recomputes) is expected


def test_a_run_that_leaves_it_open_has_the_name_of_what_the_rule_chooses() -> None:
    open_, off = (
        resolve_anywhere(RunSpec(engine=EngineSpec(fine_grained_gather=asked)))
        for asked in (None, False)
    )
    assert open_.config_hash == off.config_hash
    on = resolve_anywhere(RunSpec(engine=EngineSpec(fine_grained_gather=True)))
    assert on.config_hash != off.config_hash
