"""From cells to a plan: pruning with reasons, merging, errors with lines, plan.json."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_cases import RULE_IDS
from sweep_texts import parse_sweep

from bench.errors import UsageError
from bench.plan import Plan
from bench.resolve import Machine
from sweeps.document import SweepFileError
from sweeps.planning import make_plan, sweep_cells

LAPTOP = Machine(cpu_count=2, memory_bytes=16 * 2**30)


def plan_of(text: str, **options) -> Plan:
    return make_plan(parse_sweep("name: a\n" + text, "x.yaml"), LAPTOP, **options)


def refusal(text: str, **options) -> str:
    with pytest.raises(SweepFileError) as caught:
        plan_of(text, **options)
    return str(caught.value)


def test_a_cell_that_cannot_run_here_is_pruned_with_rule_and_reason():
    plan = plan_of("matrix:\n  product: {launch.device: [cpu, cuda]}\n")
    assert [cell.id for cell in plan.cells] == ["cpu"]
    (pruned,) = plan.pruned
    assert (pruned.id, pruned.rule) == ("cuda", "too-few-devices")
    assert pruned.reason == "needs 2 CUDA devices; this machine shows 0"


def test_cells_that_resolve_to_the_same_run_are_merged_with_a_reason():
    plan = plan_of(
        "matrix:\n  product: {dtypes.main_grads: [null, fp32], dtypes.grad_comm: [null, fp32]}\n"
    )
    assert [cell.id for cell in plan.cells] == ["main_grads=null-grad_comm=null"]
    assert [cell.same_as for cell in plan.duplicates] == ["main_grads=null-grad_comm=null"] * 3
    assert "resolves to the same run" in plan.duplicates[0].reason


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("base: {train.global_batch: 7}\n", 2, "train.global_batch: 7 sequences cannot be split"),
        ("base:\n  train:\n    steps: 3\n    global_batch: 7\n", 5, "cannot be split"),
        (
            "matrix:\n  product:\n    engine.name: [ddp]\n    train.global_batch:\n"
            "      - 8\n      - 7\n",
            7,
            "cannot be split",
        ),
        ("matrix:\n  product:\n    launch.ranks: [2,\n      3]\n", 5, "over 3 data-parallel"),
        ("base: {model.preset: huge}\n", 2, "huge"),
        ("base:\n  train.steps: 3\n  env.PATH: /bin\n", 4, "PATH"),
        (
            "matrix:\n  product:\n    bundle:\n      - {label: x}\n"
            "      - {label: y, train.warmup_steps: 99}\n",
            6,
            "warm-up",
        ),
    ],
)
def test_a_cell_wrong_on_every_machine_is_an_error_at_the_line_to_change(text, line, message):
    first = refusal(text).splitlines()[0]
    assert first.startswith(f"x.yaml:{line}: ")
    assert message in first
    text = "matrix:\n  product: {engine.name: [ddp, mfsdp], train.global_batch: [7]}\n"
    (only,) = refusal(text).splitlines()
    assert only.endswith("(cell ddp and 1 more)")


def test_what_the_command_line_fixes_is_kept_in_the_plan_and_blamed_on_no_line_of_the_file():
    message = refusal("base: {train.steps: 3}\n", fixed={"train.global_batch": 7})
    assert message.startswith("x.yaml: train.global_batch: 7")
    plan = plan_of("repeat: 3\n", fixed={"launch.env.NCCL_DEBUG": "INFO"})
    assert plan.id.startswith("a-set-")
    assert plan.to_document()["set"] == {"env.NCCL_DEBUG": "INFO"}
    assert (plan.runs, plan_of("repeat: 3\n", repeat=5).runs) == (3, 5)


def test_a_selection_keeps_the_cell_that_stands_in_for_a_duplicate():
    plan = plan_of("matrix:\n  product: {dtypes.main_grads: [null, fp32]}\n")
    chosen = plan.selected([plan.duplicates[0].id])
    assert [cell.id for cell in chosen.cells] == ["main_grads=null"]


axis_values = {
    "engine.name": ["single", "ddp", "fsdp2", "mfsdp"],
    "engine.strategy": [None, "no_shard", "optim", "optim_grads_params"],
    "launch.ranks": [1, 2, 64],
    "launch.device": ["cpu", "cuda"],
    "dtypes.main_grads": [None, "fp32", "bf16"],
    "engine.nccl_ub": [False, True],
}


@st.composite
def sweeps(draw) -> str:
    chosen = draw(st.lists(st.sampled_from(sorted(axis_values)), unique=True, max_size=4))
    axes = {
        name: draw(st.lists(st.sampled_from(axis_values[name]), unique=True, min_size=1))
        for name in chosen
    }
    base = {"train": {"global_batch": 64, "micro_batch": 1}}
    return f"base: {json.dumps(base)}\nmatrix: {json.dumps({'product': axes})}\n"


@settings(max_examples=80, deadline=None)
@given(sweeps())
def test_every_cell_is_planned_merged_or_pruned_with_a_reason_and_survives_json(text: str):
    plan = plan_of(text)
    expansion = [cell.id for cell in sweep_cells(parse_sweep("name: a\n" + text), {})]
    found = [cell.id for cell in (*plan.cells, *plan.pruned, *plan.duplicates)]
    assert sorted(found) == sorted(expansion)
    assert plan.size == len(expansion)
    assert all(cell.rule in RULE_IDS and cell.reason for cell in plan.pruned)
    ids = {cell.id for cell in plan.cells}
    assert len({cell.resolved.config_hash for cell in plan.cells}) == len(plan.cells)
    assert all(cell.same_as in ids for cell in plan.duplicates)
    assert Plan.from_document(json.loads(json.dumps(plan.to_document()))) == plan


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("cells"),
        lambda d: d.update(plan_version=99),
        lambda d: d.update(cells=3),
        lambda d: d["cells"][0].pop("resolved"),
        lambda d: d["cells"][0]["resolved"].update(train=None),
        lambda d: d.update(cells=[None]),
        lambda d: d["cells"][0].update(repeats="many"),
    ],
)
def test_a_damaged_plan_is_refused(damage):
    document = plan_of("").to_document()
    damage(document)
    with pytest.raises(UsageError, match=r"plan\.json"):
        Plan.from_document(document)


# That 10,000 are the most is told in test_sweep_schema.py.
@pytest.mark.nightly
def test_ten_thousand_cells_are_planned() -> None:
    text = (
        "name: big\nbase:\n  train: {steps: 5, global_batch: 64, micro_batch: 1}\nmatrix:\n"
        "  product:\n    engine.name: [ddp, mfsdp]\n"
        "    engine.strategy: [no_shard, optim, optim_grads, optim_grads_params]\n"
        "    dtypes.compute: [fp32, bf16]\n    model.recompute: [none, full]\n"
        f"    train.seed: [{', '.join(map(str, range(312)))}]\n"
    )
    assert make_plan(parse_sweep(text), LAPTOP).size == 9984
