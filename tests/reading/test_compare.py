"""Two sweeps, cells or runs: matching by configuration, and what is refused."""

from __future__ import annotations

import json

import pytest
from recorded_runs import (
    Arm,
    Recorded,
    fill_quickstart,
    keep_changes,
    quickstart_cells,
    record_arms,
    record_run,
    resolved_run,
    write_plan,
)

from bench.cli.compare import CompareVerb
from bench.errors import NotComparableError
from bench.spec import DataSpec
from bench.workload import ImportedRun, ImportedStep, Provenance, Workload
from reports.compare.judge import judge
from reports.compare.sides import sides_of_sweeps


@pytest.fixture
def two_sweeps(store):
    fill_quickstart(store, "before")
    fill_quickstart(store, "after", speed=0.9, seed=1)
    return store


def one_cell_sweep(store, sweep, resolved, **changes):
    write_plan(store, [("only", resolved)], sweep=sweep)
    return record_run(store, Recorded(resolved, cell="only", sweep=sweep, **changes))


def labels(sides):
    return [pair.label for pair in sides.pairs]


def shown(store, capsys, base, head, *, as_json=False, form="table", ignore=()):
    verb = CompareVerb(base=base, head=head, ignore=tuple(ignore), form=form, results=store.root)
    verb.run().show(as_json=as_json, form=form)
    return capsys.readouterr().out


def test_what_is_odd_about_a_log_is_said_where_it_is_compared(store, capsys):
    odd = "3 values that cannot be were dropped: loss nan (line 7)"
    for name, remarks in (("good", ()), ("diverged", (odd,))):
        log = Provenance(kind="imported", source=name, remarks=remarks)
        steps = (ImportedStep(1, loss=2.0),)
        store.imports.write(ImportedRun(name, Workload(framework="x"), log, steps))
    assert f"\n- diverged: {odd}\n" in shown(store, capsys, "good", "diverged")


def test_equal_sweeps_match_cell_by_cell(two_sweeps):
    sides = sides_of_sweeps(two_sweeps, "before", "after")
    assert len(sides.pairs) == 12
    assert (sides.not_comparable, sides.set_aside, sides.differences) == ((), (), ())
    judged = judge(sides).judgements
    ratios = [one.throughput_ratio for one in judged if one.metric == "step_time"]
    assert ratios == [pytest.approx(1 / 0.9, rel=0.1)] * 12


def test_the_axis_in_which_two_sweeps_differ_is_found_and_set_aside(store, capsys):
    for sweep, seed in (("first", 1), ("second", 2)):
        data = DataSpec(kind="text", seed=seed)
        cells = [(s, resolved_run("mfsdp", s, data=data)) for s in ("optim", "optim_grads")]
        write_plan(store, cells, sweep=sweep)
        for name, resolved in cells:
            record_run(store, Recorded(resolved, cell=name, sweep=sweep))
    sides = sides_of_sweeps(store, "first", "second")
    assert sides.set_aside == ("data.seed",)
    assert labels(sides) == ["optim", "optim_grads"]
    text = shown(store, capsys, "first", "second")
    assert "set aside when matching: data.seed" in text


def test_a_named_axis_is_set_aside_within_one_sweep(two_sweeps, capsys):
    with pytest.raises(NotComparableError, match="--ignore"):  # two cells for every key
        shown(two_sweeps, capsys, "before", "after", ignore=["dtypes"])
    sides = sides_of_sweeps(two_sweeps, "before:ddp-fp32", "before:ddp-bf16", ["dtypes"])
    assert labels(sides) == ["ddp-fp32 -> ddp-bf16"]
    assert sides.differences == ("dtypes.compute: fp32, bf16", "dtypes.grad_comm: fp32, bf16")
    ask = two_sweeps, capsys, "before:ddp-fp32", "before:ddp-bf16"
    text = shown(*ask, ignore=["dtypes"])
    assert "differs in (base, head): dtypes.compute: fp32, bf16; dtypes.grad_comm" in text
    said = "^not comparable: compute dtype fp32, bf16; dtype of gradient communication fp32, bf16"
    with pytest.raises(NotComparableError, match=said + "; .*: --ignore dtypes$"):
        shown(*ask)


def test_cells_without_a_partner_are_listed(two_sweeps):
    cells = [*quickstart_cells()[:2], ("extra", resolved_run(ranks=4))]
    write_plan(two_sweeps, cells, sweep="partly")
    for name, resolved in cells:
        record_run(two_sweeps, Recorded(resolved, cell=name, sweep="partly"))
    sides = sides_of_sweeps(two_sweeps, "before", "partly")
    assert labels(sides) == ["ddp-fp32", "ddp-bf16"]
    without = [why for _, why in sides.not_comparable]
    assert without.count("no cell of equal configuration in head") == 10
    assert sides.not_comparable[0] == ("extra", "no cell of equal configuration in base")


def test_every_arm_of_a_sweep_stands_beside_the_first(store, capsys):
    arms = {"base": Arm(), "slow": Arm(slower=1.1), "fast": Arm(slower=0.9)}
    record_arms(store, arms, noise=0.003)
    sides = [f"gate [{arm}] (head) against gate [base] (base)" for arm in ("slow", "fast")]
    assert [one for one in shown(store, capsys, "gate", None).splitlines() if one in sides] == sides
    told = json.loads(shown(store, capsys, "gate", None, as_json=True))
    verdicts = [
        {one["verdict"] for one in each["judgements"] if one["metric"] == "step_time"}
        for each in (told, *told["further_arms"])
    ]
    assert verdicts == [{"regressed"}, {"improved"}]


def test_an_arm_that_never_ran_hides_no_other(store, capsys):
    crashed = Arm(states=dict.fromkeys(range(8), "crashed"))
    record_arms(store, {"base": Arm(), "gone": crashed, "slow": Arm(slower=1.1)}, noise=0.003)
    text = shown(store, capsys, "gate", None)
    assert "gate [slow] (head) against gate [base] (base)" in text
    assert "arm gone is not compared: gate" in text
    told = json.loads(shown(store, capsys, "gate", None, as_json=True))
    assert [*told["arms_not_compared"]] == ["gone"]


def test_two_runs_can_be_compared_by_parts_of_their_ids(store):
    resolved = resolved_run()
    launch = resolved.launch.model_copy(update={"timeout_seconds": 1.0})
    one_cell_sweep(store, "c", resolved)  # with other limits only, the configuration is equal
    one_cell_sweep(store, "d", resolved.model_copy(update={"launch": launch}))
    sides = sides_of_sweeps(store, "c", "d")
    assert (len(sides.pairs), sides.differences) == (1, ())
    first = one_cell_sweep(store, "a", resolved_run("ddp", "no_shard"))
    second = one_cell_sweep(store, "b", resolved_run("mfsdp", "optim"), speed=0.5)
    sides = sides_of_sweeps(store, first.run_id, second.run_id[-12:])
    assert len(sides.pairs) == 1
    assert any(text.startswith("engine.name: ddp, mfsdp") for text in sides.differences)


def test_runs_of_other_schema_versions_are_not_compared(store, capsys):
    one_cell_sweep(store, "a", resolved_run())
    file = one_cell_sweep(store, "b", resolved_run()).path / "status.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": 0}))
    keep_changes(store)
    with pytest.raises(NotComparableError, match="schema versions differ: 1 and 0"):
        shown(store, capsys, "a", "b")
