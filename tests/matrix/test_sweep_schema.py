"""What a sweep file may say, and what it is told otherwise, with the line."""

from __future__ import annotations

import pytest

from bench.spec.engine_lookup import engine_names
from sweeps.definition import load_sweep, parse_sweep
from sweeps.document import SweepFileError
from sweeps.matrix import expand


def refusals(text: str) -> list[str]:
    with pytest.raises(SweepFileError) as caught:
        parse_sweep(text, "x.yaml")
    return str(caught.value).splitlines()


def test_a_name_alone_is_one_cell_of_defaults():
    definition = parse_sweep("name: only\n")
    (cell,) = expand(definition.matrix)
    assert (cell.id, cell.spec.model.preset) == ("base", "debug")


def test_base_may_be_written_nested_or_with_dots():
    nested = parse_sweep("name: a\nbase:\n  train: {steps: 7}\n")
    dotted = parse_sweep("name: a\nbase:\n  train.steps: 7\n")
    assert nested.matrix.base == dotted.matrix.base == {"train.steps": 7}


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


def test_empty_sections_are_absent_ones():
    definition = parse_sweep("name: a\nbase:\n  train:\nmatrix:\noverrides:\ndescription:\n")
    assert len(expand(definition.matrix)) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("descriptoin: x\nname: a\n", "x.yaml:1: unknown key 'descriptoin'; did you mean 'desc"),
        ("description: x\n", "name: this key is required"),
        ("name: a b\n", "x.yaml:1: name: expected letters, digits"),
        ("name: ../../etc\n", "x.yaml:1: name: expected letters, digits"),
        ("name: 3\n", "x.yaml:1: name: expected a valid string, found 3"),
        ("name: a\nrepeat: 0\n", "x.yaml:2: repeat: expected a value greater than or equal to 1"),
        ("name: a\nrepeat: true\n", "x.yaml:2: repeat: expected a valid integer, found True"),
        ("name: a\nmatrix:\n  prodct: {}\n", "x.yaml:3: unknown key 'matrix.prodct'; did you mean"),
        ("name: a\nmatrix: [1]\n", "x.yaml:2: matrix: expected"),
        ("name: a\nbase: 3\n", "x.yaml:2: base: expected a mapping of settings"),
        ("name: a\nbase:\n  modle.preset: x\n", "x.yaml:3: unknown setting 'modle.preset'; did"),
        ("name: a\nbase:\n  train:\n    stpes: 3\n", "x.yaml:4: unknown setting 'train.stpes'"),
        ("name: a\nbase:\n  train: 3\n", "x.yaml:3: 'train' is a section, expected a value in it"),
        ("name: a\nbase:\n  train.steps: '3'\n", "expected a valid integer, found '3'"),
        ("name: a\nbase:\n  train.steps: [3]\n", "expected a single value, found a list"),
        (
            "name: a\nbase: {train.steps: 3, train: {steps: 4}}\n",
            "x.yaml:2: train.steps is already set on line 2",
        ),
        (
            "name: a\nmatrix:\n  product:\n    engine.name: [ddpp]\n",
            f"x.yaml:4: engine.name: expected one of {', '.join(engine_names())},"
            " package.module:factory, found 'ddpp'; did",
        ),
        ("name: a\nmatrix:\n  product:\n    name: [ddp]\n", "unknown setting 'name'; did you mean"),
        ("name: a\nmatrix:\n  product:\n    train.steps: []\n", "an axis needs at least one value"),
        ("name: a\nmatrix:\n  product:\n    train.steps: 4\n", "matrix.product.train.steps: exp"),
        ("name: a\nmatrix:\n  product:\n    train.steps: [4, 4]\n", "'4' is listed twice"),
        (
            "name: a\nmatrix:\n  product:\n    p:\n      - {label: x}\n      - 3\n",
            "x.yaml:6: expected a bundle, a mapping with a `label`",
        ),
        (
            "name: a\nmatrix:\n  product:\n    a.b:\n      - {label: x}\n",
            "x.yaml:4: 'a.b' cannot name a list of bundles",
        ),
        (
            "name: a\nmatrix:\n  product:\n    p:\n      - {label: 'x y'}\n",
            "label: expected up to 40 letters",
        ),
        (
            "name: a\nmatrix:\n  product:\n    p:\n      - {label: x, train.lr: 0}\n",
            "x.yaml:5: train.lr: expected a value greater than 0, found 0",
        ),
        (
            "name: a\nmatrix:\n  product:\n    train.steps: [1, 2]\n    p:\n"
            "      - {label: x, train.steps: 3}\n",
            "x.yaml:5: p sets train.steps, which axis train.steps (line 4) sets too",
        ),
        (
            "name: a\nmatrix:\n  zip:\n    - {train.steps: [1, 2], train.lr: [1.0]}\n",
            "x.yaml:4: axes that are zipped need the same length: train.steps has 2, train.lr has",
        ),
        ("name: a\nmatrix:\n  zip:\n    - {}\n", "a zip group needs at least one axis"),
        (
            "name: a\nmatrix:\n  product: {train.steps: [1]}\n  zip:\n    - {train.steps: [2]}\n",
            "axis train.steps is written twice",
        ),
        (
            "name: a\nmatrix:\n  product: {engine.name: [ddp]}\n  exclude:\n"
            "    - {engine.name: mfsdp}\n",
            "x.yaml:5: engine.name: expected one of ddp, found 'mfsdp'",
        ),
        (
            "name: a\nmatrix:\n  product: {engine.name: [ddp]}\n  exclude:\n    - {engin: ddp}\n",
            "x.yaml:5: 'engin' is no axis of this sweep (engine.name, cell) and no setting",
        ),
        (
            "name: a\nmatrix:\n  product: {engine.name: [ddp]}\n  exclude:\n    - {}\n",
            "a condition needs at least one key",
        ),
        (
            "name: a\nmatrix:\n  product: {engine.name: [ddp]}\n  exclude:\n"
            "    - {launch.ranks: 9}\n",
            "x.yaml:5: this exclude matches no cell",
        ),
        (
            "name: a\nmatrix:\n  product: {engine.name: [ddp]}\n  exclude:\n"
            "    - {engine.name: '*'}\n",
            "every cell is excluded",
        ),
        (
            "name: a\noverrides:\n  - when: {launch.ranks: 9}\n    set: {train.steps: 3}\n",
            "x.yaml:3: this override matches no cell",
        ),
        ("name: a\noverrides:\n  - when: {cell: base}\n", "overrides.0.set: this key is required"),
        (
            "name: a\noverrides:\n  - {when: {cell: base}, set: {}}\n",
            "an override needs at least one setting",
        ),
        (
            "name: a\nmatrix:\n  product: {train.steps: [1]}\n  include:\n    - {}\n",
            "an included cell needs at least one setting",
        ),
        (
            "name: a\nmatrix:\n  product:\n    p: [{label: x}]\n  include:\n    - {p: z}\n",
            "x.yaml:6: p: expected one of x, found 'z'",
        ),
        ("name: a\nbase:\n  launch.env: {'a b': c}\n", "not the name of an environment variable"),
        ("name: a\nbase:\n  env.NCCL_X: true\n", "env.NCCL_X: quote the value"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, expected: str):
    found = refusals(text)
    assert any(expected in line for line in found), found


def test_several_mistakes_are_reported_together_in_file_order():
    lines = refusals("name: a\nbase:\n  train.stpes: 1\n  modle.preset: x\n")
    assert [line.split(": ")[0] for line in lines] == ["x.yaml:3", "x.yaml:4"]


def test_a_matrix_too_large_to_run_is_refused_without_expanding_it():
    axes = "\n".join(f"    env.NCCL_A{i}: {list(range(100))}" for i in range(8))
    (line,) = refusals(f"name: a\nmatrix:\n  product:\n{axes}\n")
    assert line == "x.yaml:2: expands to 10,000,000,000,000,000 cells; expected at most 10,000"
