"""Expansion of a matrix: order, ids, zip, include, exclude, overrides, environment axes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_texts import parse_sweep

from sweeps.matrix import Axis, AxisValue, Condition, Matrix, expand, path_value, pinned


def env(*values: str | None) -> list[dict[str, str]]:
    return [{} if one is None else {"NCCL_X": one} for one in values]


@pytest.mark.parametrize(
    ("text", "ids", "settings"),
    [
        # The last axis written varies fastest, and one of a single value is left out of ids.
        (
            "matrix: {product: {data.seed: [3], engine.name: [ddp, mfsdp], train.steps: [1, 2]}}",
            ["ddp-steps=1", "ddp-steps=2", "mfsdp-steps=1", "mfsdp-steps=2"],
            {"train.steps": [1, 2, 1, 2], "data.seed": [3] * 4},
        ),
        (
            "matrix: {zip: [{train.global_batch: [4, 8], train.micro_batch: [1, 2]}]}",
            ["global_batch=4-micro_batch=1", "global_batch=8-micro_batch=2"],
            {"train.global_batch": [4, 8], "train.micro_batch": [1, 2]},
        ),
        # A bundle sets several settings under one label.
        (
            "matrix:\n  product:\n    policy:\n"
            "      - {label: low, dtypes: {compute: bf16, grad_comm: bf16}}\n"
            "      - {label: full, dtypes.compute: fp32}",
            ["low", "full"],
            {"dtypes.compute": ["bf16", "fp32"], "dtypes.grad_comm": ["bf16", None]},
        ),
        # Environment axes take numbers as text, and null unsets, also what base sets.
        (
            "matrix: {product: {env.NCCL_X: [null, 0, 1]}}",
            ["NCCL_X=null", "NCCL_X=0", "NCCL_X=1"],
            {"launch.env": env(None, "0", "1")},
        ),
        (
            "base: {env.NCCL_X: INFO}\nmatrix: {product: {launch.env.NCCL_X: [null, WARN]}}",
            ["NCCL_X=null", "NCCL_X=WARN"],
            {"launch.env": env(None, "WARN")},
        ),
        # Excluded are cells where all keys match.
        (
            "matrix:\n  product: {engine.name: [ddp, fsdp2, mfsdp], train.steps: [1, 2]}\n"
            "  exclude: [{engine.name: [ddp, fs*], train.steps: 2}]",
            ["ddp-steps=1", "fsdp2-steps=1", "mfsdp-steps=1", "mfsdp-steps=2"],
            {},
        ),
        # An included cell lies on base alone, and may pick a bundle by its label; equal ids are
        # numbered.
        (
            "base: {train.steps: 9}\nmatrix:\n  product: {engine.name: [ddp]}\n  include:\n"
            "    - {engine.name: single, launch.ranks: 1}\n"
            "    - {label: x, train.lr: 0.1}\n    - {label: x, train.lr: 0.2}",
            ["ddp", "single-ranks=1", "x", "x~2"],
            {"launch.ranks": [2, 1, 2, 2], "train.steps": [9] * 4},
        ),
        (
            "matrix:\n  product: {policy: [{label: low, dtypes.compute: bf16}]}\n"
            "  include: [{policy: low, train.steps: 3}]",
            ["low", "low-steps=3"],
            {"dtypes.compute": ["bf16", "bf16"], "train.steps": [20, 3]},
        ),
        # Overrides change matching cells only, and the later of two wins.
        (
            "matrix:\n  product: {engine.name: [ddp, mfsdp]}\noverrides:\n"
            "  - {when: {engine.name: mf*}, set: {engine.strategy: optim}}\n"
            "  - {when: {cell: ddp}, set: {train.steps: 3}}\n"
            "  - {when: {cell: ddp}, set: {train.steps: 4}}",
            ["ddp", "mfsdp"],
            {"engine.strategy": [None, "optim"], "train.steps": [4, 20]},
        ),
    ],
)
def test_a_matrix_expands_into_cells_in_order(text, ids, settings):
    cells = expand(parse_sweep(f"name: a\n{text}\n").matrix)
    assert [cell.id for cell in cells] == ids
    for setting, values in settings.items():
        section, key = setting.split(".")
        assert [getattr(getattr(cell.spec, section), key) for cell in cells] == values


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
    [f"train.{key}" for key in ("steps", "seed", "global_batch", "micro_batch")]
    + ["data.seed", "launch.ranks"]
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
