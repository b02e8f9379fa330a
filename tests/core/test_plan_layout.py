"""The row-aligned layout and the padding rule, without ranks or torch."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mfsdp_core.errors import LayoutError
from mfsdp_core.plan.layout import (
    PADDING_BUDGET,
    Layout,
    Slot,
    build_layout,
    row_elements,
    split_by_padding,
    within_padding_budget,
)

SHAPE = st.lists(st.integers(1, 40), min_size=0, max_size=4).map(tuple)
SHAPES = st.lists(SHAPE, min_size=1, max_size=12)
SLICES = st.integers(1, 64)


def least_padding(shape: tuple[int, ...], slices: int) -> float:
    """Padding of a tensor alone: its rows, rounded up to a multiple of the ranks."""
    rows = shape[0] if shape else 1
    return (-rows % slices) / rows


def test_cuts_ask_slices_that_hold_a_tensor_alone_and_once(monkeypatch):
    asked = []
    rows_in = Layout.rows_in
    monkeypatch.setattr(Layout, "rows_in", lambda *one: asked.append(one[1:]) or rows_in(*one))
    layout = build_layout([(4096, 2), (1024, 2), (2,), ()], 4096)
    assert layout.cuts is layout.cuts
    assert len(asked) < 2 * 4096


@settings(max_examples=400)
@given(SHAPES, SLICES)
def test_the_ranks_rows_put_together_are_the_tensor(shapes, slices):
    layout = build_layout(shapes, slices)
    for index, shape in enumerate(shapes):
        next_row = 0
        held = [layout.rows_in(index, range(rank, rank + 1)) for rank in range(slices)]
        assert list(layout.cuts[index]) == [local.rows for local in held]
        for rank, local in enumerate(held):
            assert local.elements == local.rows * row_elements(shape)
            if local.rows:
                assert local.first_row == next_row
                start = rank * layout.slice_elements + local.start
                assert start == layout.slots[index].offset + next_row * row_elements(shape)
            next_row += local.rows
        assert next_row == (shape[0] if shape else 1)


@settings(max_examples=300)
@example([(30, 4, 24, 30), (10, 36, 8, 30)], 15)  # equally large; one of them needs no padding
@given(SHAPES, SLICES)
def test_a_split_is_a_partition_whose_parts_keep_the_padding_rule(shapes, slices):
    parts = split_by_padding(shapes, slices)
    assert sorted(index for part in parts for index in part) == list(range(len(shapes)))
    for part in parts:
        layout = build_layout([shapes[i] for i in part], slices)
        most = max(prod(shapes[i]) for i in part)
        alone = min(least_padding(shapes[i], slices) for i in part if prod(shapes[i]) == most)
        bound = alone + (PADDING_BUDGET if len(part) > 1 else 0)
        assert layout.padding_fraction <= bound + 1e-9
        assert within_padding_budget(layout)


def test_a_transformer_layer_stays_one_bucket():
    hidden, ffn, kv = 4096, 14336, 1024
    shapes = [(hidden,), (hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    shapes += [(hidden,), (ffn, hidden), (ffn, hidden), (hidden, ffn)]
    assert len(split_by_padding(shapes, 64)) == 1
    assert build_layout(shapes, 64).padding_fraction < 0.004


def test_a_layout_that_breaks_its_invariants_cannot_be_built():
    with pytest.raises(LayoutError, match="overlaps"):
        Layout((Slot((4,), 0), Slot((4,), 2)), slices=2, slice_elements=4)
    with pytest.raises(LayoutError, match="row aligned"):
        Layout((Slot((2, 3), 1),), slices=1, slice_elements=9)
    with pytest.raises(LayoutError, match="past the buffer"):
        Layout((Slot((9,), 0),), slices=2, slice_elements=4)
    with pytest.raises(LayoutError, match="at least one slice"):
        build_layout([(2, 2)], 0)
