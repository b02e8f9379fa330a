"""R19: convolutions beside a linear layer may not multiply the memory of their unit."""

from __future__ import annotations

from math import prod

import pytest

from mfsdp_core.plan.grouping import ParameterFacts, plan_buckets
from mfsdp_core.plan.layout import PADDING_BUDGET, build_layout

# A convolution stem, a second convolution and a linear layer. As one bucket their row sizes have a
# least common multiple of 112,896 elements: +743 % at 8 ranks, +6,646 % at 64.
SHAPES = ((64, 3, 7, 7), (128, 64, 3, 3), (256, 512))


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_r19_padding_stays_within_the_budget_of_the_largest_parameter(ranks: int) -> None:
    facts = [ParameterFacts((str(i),), ("unit",), s, "fp32", True) for i, s in enumerate(SHAPES)]
    buckets = plan_buckets(facts, ranks)
    assert sorted(index for bucket in buckets for index in bucket.members) == [0, 1, 2]
    for bucket in buckets:
        largest = max((SHAPES[i] for i in bucket.members), key=prod)
        alone = build_layout([largest], ranks).padding_fraction
        assert bucket.layout.padding_fraction <= alone + PADDING_BUDGET
    total = sum(bucket.layout.total_elements for bucket in buckets)
    least = sum(build_layout([shape], ranks).total_elements for shape in SHAPES)
    assert total <= least * (1 + PADDING_BUDGET)


def test_r19_the_case_would_break_the_budget_without_a_split() -> None:
    assert build_layout(SHAPES, 64).padding_fraction > 60
