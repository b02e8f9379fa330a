"""--set, --only and --skip."""

from __future__ import annotations

import pytest
from sweep_texts import parse_sweep

from bench.errors import UsageError
from sweeps.matrix import expand
from sweeps.selection import parse_assignments, selected, variant_name

SWEEP = """\
name: a
base: {env.NCCL_DEBUG: WARN}
matrix:
  product:
    engine:
      - {label: ddp, engine.name: ddp}
      - {label: mfsdp-optim, engine.name: mfsdp, engine.strategy: optim}
      - {label: mfsdp-full, engine.name: mfsdp, engine.strategy: optim_grads_params}
    train.steps: [4, 8]
"""
CELLS = expand(parse_sweep(SWEEP).matrix)


@pytest.mark.parametrize(
    ("only", "skip", "ids"),
    [
        ([], [], [cell.id for cell in CELLS]),
        (["engine=ddp"], [], ["ddp-steps=4", "ddp-steps=8"]),
        (["engine=mfsdp*,train.steps=4"], [], ["mfsdp-optim-steps=4", "mfsdp-full-steps=4"]),
        (["engine=ddp|mfsdp-full"], ["train.steps=4"], ["ddp-steps=8", "mfsdp-full-steps=8"]),
        (["engine=ddp", "engine.strategy=optim"], ["train.steps=8"],
         ["ddp-steps=4", "mfsdp-optim-steps=4"]),
        (["cell=*full-steps=8"], [], ["mfsdp-full-steps=8"]),
        (["engine.name=mfsdp", "engine.strategy=null"], ["env.NCCL_DEBUG=INFO"],
         [cell.id for cell in CELLS]),
    ],
)  # fmt: skip
def test_expressions_select_cells(only, skip, ids):
    assert selected(only, skip, CELLS) == tuple(ids)


@pytest.mark.parametrize(
    ("only", "skip", "message"),
    [
        (["engine="], [], "expected KEY=PATTERN"),
        (["=ddp"], [], "expected KEY=PATTERN"),
        (["engine=dpd"], [], "engine: expected one of ddp, mfsdp-optim, mfsdp-full, found 'dpd'; "),
        (["engin=ddp"], [], "'engin' is no axis of this sweep (engine, train.steps, cell)"),
        (["engine=ddp,engine=mfsdp*"], [], "engine is given twice; write a|b"),
        ([], ["engine=*"], "no cell is left by --skip engine=*"),
    ],
)
def test_expressions_that_mean_nothing_are_refused(only, skip, message):
    with pytest.raises(UsageError) as caught:
        selected(only, skip, CELLS)
    assert message in str(caught.value)


def test_values_of_set_are_read_as_yaml():
    assert parse_assignments(
        ["train.steps=8", "dtypes.grad_comm=null", "train.lr=1e-3", "env.NCCL_ALGO=Ring",
         "launch.env.NCCL_NVLS_ENABLE=0", "env.NCCL_X=a: b"]
    ) == {
        "train.steps": 8,
        "dtypes.grad_comm": None,
        "train.lr": 1e-3,
        "launch.env.NCCL_ALGO": "Ring",
        "launch.env.NCCL_NVLS_ENABLE": "0",
        "launch.env.NCCL_X": "a: b",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.steps", "--set train.steps: expected PATH=VALUE"),
        ("train.stpes=3", "--set train.stpes=3: unknown setting 'train.stpes'; did you mean"),
        ("train.steps=many", "expected a valid integer, found 'many'"),
        ("train.steps=[1, 2]", "expected a single value"),
        ("engine=ddp", "'engine' is a section"),
    ],
)
def test_assignments_that_no_run_takes_are_refused(text, message):
    with pytest.raises(UsageError) as caught:
        parse_assignments([text])
    assert message in str(caught.value)


def test_a_sweep_with_fixed_settings_has_an_id_of_its_own():
    assert variant_name("a", {}) == "a"
    one = variant_name("a", {"train.steps": 3, "train.lr": 0.1})
    assert one == variant_name("a", {"train.lr": 0.1, "train.steps": 3})
    assert one != variant_name("a", {"train.steps": 4, "train.lr": 0.1})
    assert one.startswith("a-set-")
