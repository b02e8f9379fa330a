"""Expansion of a matrix: order, ids, zip, include, exclude, overrides, environment axes."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.definition import parse_sweep
from sweeps.matrix import (
    Axis,
    AxisValue,
    Condition,
    Matrix,
    expand,
    path_value,
    pinned,
)


def cells_of(text: str):
    return expand(parse_sweep("name: a\n" + text).matrix)


def test_the_last_axis_written_varies_fastest():
    cells = cells_of("matrix:\n  product: {engine.name: [ddp, mfsdp], train.steps: [1, 2]}\n")
    assert [cell.id for cell in cells] == [
        "ddp-steps=1",
        "ddp-steps=2",
        "mfsdp-steps=1",
        "mfsdp-steps=2",
    ]


def test_zipped_axes_advance_together():
    cells = cells_of(
        "matrix:\n  zip:\n    - {train.global_batch: [4, 8], train.micro_batch: [1, 2]}\n"
    )
    assert [(c.spec.train.global_batch, c.spec.train.micro_batch) for c in cells] == [
        (4, 1),
        (8, 2),
    ]


def test_a_bundle_sets_several_settings_under_one_label():
    cells = cells_of(
        "matrix:\n  product:\n    policy:\n"
        "      - {label: low, dtypes: {compute: bf16, grad_comm: bf16}}\n"
        "      - {label: full, dtypes.compute: fp32}\n"
    )
    assert [(c.id, c.spec.dtypes.compute, c.spec.dtypes.grad_comm) for c in cells] == [
        ("low", "bf16", "bf16"),
        ("full", "fp32", None),
    ]


def test_an_axis_of_one_value_is_left_out_of_ids():
    cells = cells_of("matrix:\n  product: {train.steps: [3], engine.name: [ddp, mfsdp]}\n")
    assert [cell.id for cell in cells] == ["ddp", "mfsdp"]


def test_environment_axes_take_numbers_as_text_and_null_as_unset():
    cells = cells_of("matrix:\n  product:\n    env.NCCL_NVLS_ENABLE: [null, 0, 1]\n")
    assert [cell.spec.launch.env for cell in cells] == [
        {},
        {"NCCL_NVLS_ENABLE": "0"},
        {"NCCL_NVLS_ENABLE": "1"},
    ]


def test_null_unsets_what_base_sets():
    cells = cells_of(
        "base: {env.NCCL_DEBUG: INFO}\nmatrix:\n  product:\n"
        "    launch.env.NCCL_DEBUG: [null, WARN]\n"
    )
    assert [cell.spec.launch.env for cell in cells] == [{}, {"NCCL_DEBUG": "WARN"}]


def test_exclude_drops_cells_where_all_keys_match():
    cells = cells_of(
        "matrix:\n  product: {engine.name: [ddp, fsdp2, mfsdp], train.steps: [1, 2]}\n"
        "  exclude:\n    - {engine.name: [ddp, fs*], train.steps: 2}\n"
    )
    assert [cell.id for cell in cells] == [
        "ddp-steps=1",
        "fsdp2-steps=1",
        "mfsdp-steps=1",
        "mfsdp-steps=2",
    ]


def test_include_adds_a_cell_on_base_alone():
    cells = cells_of(
        "base: {train.steps: 9}\nmatrix:\n  product: {engine.name: [ddp]}\n"
        "  include:\n    - {engine.name: single, launch.ranks: 1}\n"
        "    - {label: named, train.lr: 0.1}\n"
    )
    assert [cell.id for cell in cells] == ["ddp", "single-ranks=1", "named"]
    assert (cells[1].spec.launch.ranks, cells[1].spec.train.steps) == (1, 9)


def test_include_may_pick_a_bundle_by_its_label():
    cells = cells_of(
        "matrix:\n  product:\n    policy: [{label: low, dtypes.compute: bf16}]\n"
        "  include:\n    - {policy: low, train.steps: 3}\n"
    )
    assert cells[1].spec.dtypes.compute == "bf16"
    assert cells[1].labels["policy"] == "low"


def test_overrides_change_matching_cells_only_and_the_later_of_two_wins():
    cells = cells_of(
        "matrix:\n  product: {engine.name: [ddp, mfsdp]}\n"
        "overrides:\n  - {when: {engine.name: mf*}, set: {engine.strategy: optim}}\n"
        "  - {when: {cell: ddp}, set: {train.steps: 3}}\n"
        "  - {when: {cell: ddp}, set: {train.steps: 4}}\n"
    )
    assert [cell.spec.engine.strategy for cell in cells] == [None, "optim"]
    assert [cell.spec.train.steps for cell in cells] == [4, 20]


def test_equal_ids_are_numbered():
    cells = cells_of(
        "matrix:\n  product: {engine.name: [ddp]}\n"
        "  include:\n    - {label: x, train.lr: 0.1}\n    - {label: x, train.lr: 0.2}\n"
    )
    assert [cell.id for cell in cells] == ["ddp", "x", "x~2"]


def test_pinning_a_setting_collapses_its_axis_and_wins_everywhere():
    definition = parse_sweep(
        "name: a\nbase: {train.steps: 1}\n"
        "matrix:\n  product:\n    train.steps: [2, 3]\n    p: [{label: x, train.lr: 0.5}]\n"
        "  include: [{label: y, train.steps: 4}]\n"
        "overrides: [{when: {cell: y}, set: {train.lr: 0.25}}]\n"
    )
    cells = expand(pinned(definition.matrix, {"train.steps": 7, "train.lr": 0.125}))
    assert [cell.spec.train.steps for cell in cells] == [7, 7]
    assert [cell.spec.train.lr for cell in cells] == [0.125, 0.125]


names = st.sampled_from(
    [
        "train.steps",
        "train.seed",
        "data.seed",
        "launch.ranks",
        "train.global_batch",
        "train.micro_batch",
    ]
)
lengths = st.integers(1, 4)


@st.composite
def matrices(draw):
    chosen = draw(st.lists(names, unique=True, min_size=1, max_size=6))
    product, zips = [], []
    while chosen:
        name = chosen.pop()
        length = draw(lengths)
        group = [name]
        if draw(st.booleans()) and chosen:
            group.append(chosen.pop())
        axes = tuple(
            Axis(one, tuple(path_value(one, number) for number in range(1, length + 1)))
            for one in group
        )
        if len(axes) == 1:
            product.append(axes[0])
        else:
            zips.append(axes)
    return Matrix(product=tuple(product), zips=tuple(zips))


@settings(max_examples=60, deadline=None)
@given(matrices())
def test_every_point_is_one_cell_with_an_id_of_its_own(matrix: Matrix):
    lengths_of_all = [len(axis.values) for axis in matrix.product]
    lengths_of_all += [len(group[0].values) for group in matrix.zips]
    cells = expand(matrix)
    assert len(cells) == math.prod(lengths_of_all) == matrix.size
    assert len({cell.id for cell in cells}) == len(cells)
    assert expand(matrix) == cells
    points = [tuple(sorted(cell.labels.items())) for cell in cells]
    assert len(set(points)) == len(points)
    assert all(len(point) == len(matrix.axes) for point in points)


@settings(max_examples=60, deadline=None)
@given(matrices(), st.data(), st.integers(1, 5))
def test_excluded_cells_are_left_out_of_the_order_and_included_ones_come_last(
    matrix: Matrix, data, count: int
):
    axis = data.draw(st.sampled_from(matrix.axes))
    label = data.draw(st.sampled_from([value.label for value in axis.values]))
    rule = Condition({axis.name: (label,)})
    everything = expand(matrix)
    kept = expand(Matrix(product=matrix.product, zips=matrix.zips, exclude=(rule,)))
    assert [cell.labels for cell in kept] == [
        cell.labels for cell in everything if cell.labels[axis.name] != label
    ]
    include = tuple((AxisValue(f"extra{i}", {"train.lr": float(i + 1)}), {}) for i in range(count))
    cells = expand(Matrix(product=matrix.product, zips=matrix.zips, include=include))
    assert cells[: matrix.size] == everything
    assert [cell.id for cell in cells[matrix.size :]] == [f"extra{i}" for i in range(count)]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "a-b", "b", "b-a"]), unique=True, min_size=1),
    st.lists(st.sampled_from(["a", "a-b", "b", "b-a"]), unique=True, min_size=1),
)
def test_ids_stay_unique_where_joined_labels_collide(left, right):
    axes = tuple(
        Axis(name, tuple(AxisValue(label, {}, bare=True) for label in labels))
        for name, labels in (("one", left), ("two", right))
    )
    cells = expand(Matrix(product=axes))
    assert len({cell.id for cell in cells}) == len(left) * len(right)
