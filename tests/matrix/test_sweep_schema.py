"""What a sweep file may say, and what it is told otherwise, with the line."""

from __future__ import annotations

import pytest
from sweep_texts import parse_sweep, refusal

from bench.spec.engine_table import engine_names
from sweeps.definition import load_sweep
from sweeps.document import SweepFileError
from sweeps.matrix import expand


def test_a_name_alone_is_one_cell_of_defaults_and_base_may_be_nested_or_dotted():
    for empty in ("", "base:\n  train:\nmatrix:\noverrides:\ndescription:\n"):
        (cell,) = expand(parse_sweep(f"name: only\n{empty}").matrix)
        assert (cell.id, cell.spec.model.preset) == ("base", "debug")
    for base in ("train: {steps: 7}", "train.steps: 7"):
        assert parse_sweep(f"name: a\nbase:\n  {base}\n").matrix.base == {"train.steps": 7}


def test_a_file_lies_over_the_base_of_the_file_that_it_extends(tmp_path):
    (tmp_path / "below.yaml").write_text("name: below\nbase: {train: {steps: 7, lr: 0.5}}\n")
    above = tmp_path / "above.yaml"
    above.write_text("name: above\nextends: below.yaml\nbase: {train.lr: 0.25}\n")
    assert load_sweep(above).matrix.base == {"train.steps": 7, "train.lr": 0.25}
    (tmp_path / "third.yaml").write_text("name: third\nextends: above.yaml\n")
    with pytest.raises(SweepFileError, match=r"third.yaml:2: extends: above.yaml extends below"):
        load_sweep(tmp_path / "third.yaml")
    above.write_text("name: above\nextends: gone.yaml\n")
    with pytest.raises(SweepFileError, match=r"gone.yaml: no such file"):
        load_sweep(above)


ENGINES = ", ".join(engine_names())
DDP = "matrix:\n  product: {engine.name: [ddp]}\n"
#: What follows the first line, `name: a`, and what is said of it.
MISTAKES = [
    ("descriptoin: x", "x.yaml:2: unknown key 'descriptoin'; did you mean 'desc"),
    ("repeat: 0", "x.yaml:2: repeat: expected a value greater than or equal to 1"),
    ("repeat: true", "x.yaml:2: repeat: expected a valid integer, found True"),
    ("dtypes: {compute: bf16}", "x.yaml:2: unknown key 'dtypes'; it is a key of base"),
    (
        "matrix:\n  repeat: 2",
        "x.yaml:3: unknown key 'matrix.repeat'; it is a key of the file itself",
    ),
    ("matrix:\n  prodct: {}", "x.yaml:3: unknown key 'matrix.prodct'; did you mean"),
    ("require: [{when: {cell: base}, nccl: AG=sym, min_byte: 1}]", "did you mean 'min_bytes'"),
    ("matrix: [1]", "x.yaml:2: matrix: expected"),
    ("base: 3", "x.yaml:2: base: expected a mapping of settings"),
    ("base:\n  modle.preset: x", "x.yaml:3: unknown setting 'modle.preset'; did"),
    ("base:\n  train:\n    stpes: 3", "x.yaml:4: unknown setting 'train.stpes'"),
    ("base:\n  train: 3", "x.yaml:3: 'train' is a section, expected a value in it"),
    ("base:\n  train.steps: '3'", "expected a valid integer, found '3'"),
    ("base:\n  train.steps: [3]", "expected a single value, found a list"),
    ("base: {train.steps: 3, train: {steps: 4}}", "x.yaml:2: train.steps is already set on line 2"),
    ("base:\n  launch.env: {'a b': c}", "not the name of an environment variable"),
    ("base:\n  env.NCCL_X: true", "env.NCCL_X: quote the value"),
    (
        "matrix:\n  product:\n    engine.name: [ddpp]",
        f"4: engine.name: expected one of {ENGINES}, package.module:factory, found 'ddpp'; did",
    ),
    ("matrix:\n  product:\n    name: [ddp]", "unknown setting 'name'; did you mean"),
    ("matrix:\n  product:\n    train.steps: []", "an axis needs at least one value"),
    ("matrix:\n  product:\n    train.steps: 4", "matrix.product.train.steps: exp"),
    ("matrix:\n  product:\n    train.steps: [4, 4]", "'4' is listed twice"),
    (
        "matrix:\n  product:\n    p:\n      - {label: x}\n      - 3",
        "x.yaml:6: expected a bundle, a mapping with a `label`",
    ),
    (
        "matrix:\n  product:\n    a.b:\n      - {label: x}",
        "x.yaml:4: 'a.b' cannot name a list of bundles",
    ),
    ("matrix: {product: {p: [{label: 'x y'}]}}", "label: expected up to 40 letters"),
    (
        "matrix:\n  product:\n    p:\n      - {label: x, train.lr: 0}",
        "x.yaml:5: train.lr: expected a value greater than 0, found 0",
    ),
    (
        "matrix:\n  product:\n    train.steps: [1, 2]\n    p: [{label: x, train.steps: 3}]",
        "x.yaml:5: p sets train.steps, which axis train.steps (line 4) sets too",
    ),
    (
        "matrix:\n  zip:\n    - {train.steps: [1, 2], train.lr: [1.0]}",
        "x.yaml:4: axes that are zipped need the same length: train.steps has 2, train.lr has",
    ),
    ("matrix:\n  zip:\n    - {}", "a zip group needs at least one axis"),
    (DDP + "  zip:\n    - {engine.name: [ddp]}", "axis engine.name is written twice"),
    (
        DDP + "  exclude:\n    - {engine.name: mfsdp}",
        "x.yaml:5: engine.name: expected one of ddp, found 'mfsdp'",
    ),
    (
        DDP + "  exclude:\n    - {engin: ddp}",
        "x.yaml:5: 'engin' is no axis of this sweep (engine.name, cell) and no setting",
    ),
    (DDP + "  exclude:\n    - {}", "a condition needs at least one key"),
    (DDP + "  exclude:\n    - {launch.ranks: 9}", "x.yaml:5: this exclude matches no cell"),
    (DDP + "  exclude:\n    - {engine.name: '*'}", "every cell is excluded"),
    (
        "overrides:\n  - when: {launch.ranks: 9}\n    set: {train.steps: 3}",
        "x.yaml:3: this override matches no cell",
    ),
    ("overrides:\n  - when: {cell: base}", "overrides.0.set: this key is required"),
    ("overrides:\n  - {when: {cell: base}, set: {}}", "an override needs at least one setting"),
    (DDP + "  include:\n    - {}", "an included cell needs at least one setting"),
    (
        "matrix:\n  product:\n    p: [{label: x}]\n  include:\n    - {p: z}",
        "x.yaml:6: p: expected one of x, found 'z'",
    ),
    ("matrix: {product: {p: [{label: x}]}, include: [{p: [x]}]}", "one of x, found ['x']"),
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("description: x\n", "name: this key is required"),
        ("name: ../../etc\n", "x.yaml:1: name: expected letters, digits"),
        ("name: 3\n", "x.yaml:1: name: expected a valid string, found 3"),
        *((f"name: a\n{text}\n", expected) for text, expected in MISTAKES),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, expected: str):
    found = refusal(text).splitlines()
    assert any(expected in line for line in found), found


def test_several_mistakes_are_reported_together_in_file_order():
    lines = refusal("name: a\nbase:\n  train.stpes: 1\n  modle.preset: x\n").splitlines()
    assert [line.split(": ")[0] for line in lines] == ["x.yaml:3", "x.yaml:4"]


def test_a_matrix_too_large_to_run_is_refused_without_expanding_it():
    axes = "\n".join(f"    env.NCCL_A{i}: {list(range(100))}" for i in range(8))
    (line,) = refusal(f"name: a\nmatrix:\n  product:\n{axes}\n").splitlines()
    assert line == "x.yaml:2: expands to 10,000,000,000,000,000 cells; expected at most 10,000"
