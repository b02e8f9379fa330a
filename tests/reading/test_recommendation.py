"""A report opens with one recommendation and its uncertainty, or says why there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recorded_runs import (
    CELLS,
    Arm,
    Recorded,
    fill_quickstart,
    held,
    record_arms,
    record_run,
    resolved_run,
    write_plan,
)

from bench.spec import EngineSpec
from reports.build import build_document
from reports.findings import find
from reports.renderers.document import Bullets, Code
from reports.sections.recommendation import fastest_so_far, recommendation
from reports.views.sweep_view import load_sweeps

POOL = EngineSpec(
    name="mfsdp", strategy="optim_grads_params", allocator="max_pool", double_buffer=True
)
PLAIN = EngineSpec(name="mfsdp", strategy="optim_grads_params")


def found(store, *sweeps: str, reference: str | None = None):
    return find(store, load_sweeps(store, sweeps or ["quickstart"]), reference)


def said(findings) -> str:
    """The whole recommendation as a text: its sentence, its reasons, its command."""
    lines = []
    for block in recommendation(findings):
        if isinstance(block, Bullets):
            lines += [f"{name}: {text}" for name, text in block.items]
        else:
            lines.append(f"$ {block.text}" if isinstance(block, Code) else block.text)
    return "\n".join(lines)


def measure(store, cells, runs: int = 6) -> None:
    """Cells of one sweep: name -> (what ran, how slow it is, how far its losses are off)."""
    write_plan(store, [(name, resolved) for name, (resolved, _, _) in cells.items()])
    for name, (resolved, slower, shift) in cells.items():
        for repeat in range(runs):
            times = [100 * slower * (1 + 0.002 * repeat + 0.0005 * (n % 3)) for n in range(21)]
            run = Recorded(resolved, cell=name, repeat=repeat, loss_shift=shift, noise=0.0)
            record_run(store, replace(run, milliseconds=times.__getitem__))


def test_single_runs_decide_losses_memory_and_bytes_and_say_how_many_decide_times(store) -> None:
    ran = {"argv": ["mfsdp-bench", "run", "my sweep.yaml", "--repeat", "1"]}
    fill_quickstart(store, environment=ran)
    record_run(store, Recorded(resolved_run(ranks=4), cell="other ranks", milliseconds=lambda _: 9))
    assert said(found(store)).split("\n") == [
        "One run of each cell decides losses, memory and bytes, and no step time.",
        "losses: those of 10 of 10 cells agree with the reference's",
        "memory, fp32: fsdp2-fp32 and mfsdp-optim_grads_params-fp32 need least: ledger peak "
        "-44.9 % against ddp-fp32, for bytes sent +50.0 %",
        "memory, bf16, main fp32, comm bf16: fsdp2-bf16 and mfsdp-optim_grads_params-bf16 need "
        "least: ledger peak -44.9 % against ddp-bf16, for bytes sent +50.0 %",
        "step times: not decided: 6 runs of each cell could",
        "$ mfsdp-bench run 'my sweep.yaml' --repeat 6",
    ]
    first = build_document(found(store)).sections[0].blocks
    assert first[:3] == tuple(recommendation(found(store)))
    fp32, bf16 = fastest_so_far(found(store))
    assert fp32.startswith("fp32, not decided: none was faster than ddp-fp32; the nearest was ")
    assert bf16.startswith("bf16, main fp32, ")
    assert "ddp-bf16" in bf16
    assert "ddp-fp32" not in bf16
    record_run(store, Recorded(resolved_run(), sweep="b", cell="only", state="crashed"))
    assert said(found(store, "b")) == "No recommendation: nothing was measured."


def test_the_least_memory_is_of_what_all_cells_measured_and_names_all_that_hold_it(store) -> None:
    """DDP and FSDP2 have a bound of a ledger, which is no measured peak."""
    cells = {
        "ddp": (resolved_run("ddp", "no_shard"), held(8.0, 10, is_bound=True)),
        "fsdp2": (resolved_run("fsdp2", "optim_grads"), held(7.0, 4, is_bound=True)),
        "ours": (resolved_run("mfsdp", "optim_grads"), held(6.0, 4)),
    }
    write_plan(store, [(name, resolved) for name, (resolved, _) in cells.items()])
    for name, (resolved, memory) in cells.items():
        record_run(store, Recorded(resolved, cell=name, memory=memory))
    assert "fsdp2 and ours need least: live storage -60.0 % against ddp" in said(found(store))
    record_run(store, Recorded(cells["ddp"][0], cell="ddp", memory=held(8.0, 4, is_bound=True)))
    assert "memory, fp32: by live storage, no cell needs less than ddp" in said(found(store))
    record_run(store, Recorded(cells["ddp"][0], cell="ddp", memory=held(8.0, 10, is_bound=True)))
    # Live storage is read between steps, when no matrix is whole.
    spec = EngineSpec(name="mfsdp", strategy="optim_grads", matrices="whole")
    whole = resolved_run("mfsdp", "optim_grads").model_copy(update={"engine": spec})
    runs = {name: resolved for name, (resolved, _) in cells.items()} | {"whole": whole}
    write_plan(store, list(runs.items()))
    record_run(store, Recorded(whole, cell="whole", memory=held(2.0, 2)))
    text = said(found(store))
    assert "fsdp2 and ours need least: live storage -60.0 % against ddp" in text
    assert "; not with whole, whose whole matrices no number has" in text


def test_where_the_machine_was_busy_no_cell_is_called_the_fastest(store) -> None:
    fill_quickstart(store, environment={"load_average_before": 9.0})
    assert fastest_so_far(found(store)) == []
    page = str(build_document(found(store)).sections[0])
    assert "Times and throughput mean little" in page
    assert "fastest" not in page
    assert "the nearest was" not in page


def test_cells_whose_times_drift_are_measured_and_decide_the_same(store) -> None:
    cells = {"ddp": resolved_run("ddp", "no_shard"), "ours": resolved_run("mfsdp")}
    write_plan(store, list(cells.items()))
    for name, resolved in cells.items():
        drifts = Recorded(resolved, cell=name, milliseconds=lambda step: 100 * 1.07**step)
        record_run(store, drifts)
    document = build_document(found(store))
    whole = said(found(store))
    assert "losses: those of 1 of 1 cell agree" in whole
    assert "ours needs least" in whole
    text = str(document.sections)
    assert "('Measured', '2 of 2 cells, 2 without a time')" in text
    assert "Without a time, for the reason under Not measured: ddp, ours." in text
    assert "tone='warning'" not in text


OURS = "Recommended: ours in the place of ddp.\nstep time: "
FASTER = "time -20.0 %, throughput +25.0 %, ratio 1.250x; 95 % interval of the time -"
OPEN = "No recommendation: ours against ddp is not decided.\nwhy: cannot decide"


@pytest.mark.parametrize(
    ("slower", "shift", "runs", "begins", "has"),
    [
        # Faster: with three numbers and an interval, unless its losses are others.
        (0.8, 0.0, 6, f"{OURS}improved: {FASTER}", "n=6\nmemory: ledger peak -"),
        (0.8, 0.01, 6, "No recommendation: no loss is that of its reference.", ""),
        (0.8, 0.0, 3, OPEN, "at least 4 runs on each side"),
        # Slower: the reference. Equal: the smaller memory.
        (1.2, 0.0, 6, "Recommended: ddp. The nearest, ours, is slower.\nstep time: time +", ""),
        (1.0, 0.0, 6, f"{OURS}equivalent: time 0.0 %, ", "memory: ledger peak -"),
    ],
)
def test_a_cell_is_recommended_by_time_then_memory_where_losses_agree(
    store, slower, shift, runs, begins, has
) -> None:
    ours, ddp = resolved_run("mfsdp"), resolved_run("ddp", "no_shard")
    measure(store, {"ddp": (ddp, 1.0, 0.0), "ours": (ours, slower, shift)}, runs)
    text = said(found(store))
    assert text.startswith(begins)
    assert has in text


def test_policies_are_not_recommended_against_each_other(store) -> None:
    wide = resolved_run("ddp", "no_shard")
    narrow = resolved_run("ddp", "no_shard", dtype="bf16", comm="bf16")
    measure(store, {"wide": (wide, 1.0, 0.0), "narrow": (narrow, 0.5, 0.0)})
    expected = "No recommendation: no two cells are of one dtype policy."
    assert said(found(store)) == expected
    assert said(found(store, reference="wide")) == expected


@pytest.mark.parametrize(
    ("head", "blocks", "text"),
    [
        (
            *(Arm(slower=0.8, code="other"), 8),
            "Recommended: arm head in the place of arm base.\nstep_time: improved in 3 of 3 ",
        ),
        (
            *(Arm(slower=1.2, code="other"), 8),
            "Recommended: arm base, since arm head regressed.\nstep_time: regressed in 3 of 3 ",
        ),
        (Arm(), 8, "No recommendation: arm head is equivalent in all that is required."),
        (
            *(Arm(slower=0.8, states={0: "crashed"}), 8),
            "No recommendation: arm head is not decided.\nwhy: not everything was measured",
        ),
        (
            *(Arm(slower=0.8), 3),
            "No recommendation: arm head is not decided.\nwhy: 3 of 3 cells undecided; ddp, ",
        ),
    ],
)
def test_arms_are_recommended_by_all_that_a_gate_requires(store, head, blocks, text) -> None:
    record_arms(store, {"base": Arm(), "head": head}, noise=0.002, blocks=blocks)
    told = said(found(store, "gate"))
    assert told.startswith(text)
    assert told.endswith("\n$ mfsdp-bench gate gate --base base --head head")


def test_a_change_that_is_told_block_by_block_is_not_told_again(store) -> None:
    record_arms(store, {"base": Arm(), "head": Arm(slower=1.2)}, cells={"ddp": CELLS["ddp"]})
    document = build_document(found(store, "gate"))
    tables = [
        block.table
        for section in document.sections
        for block in section.blocks
        if hasattr(block, "table")
    ]
    speeds = [
        (column.title, row.cells[at])
        for table in tables
        for at, column in enumerate(table.columns)
        for row in table.rows
        if "time change" in column.title
    ]
    assert len(speeds) == 1
    assert speeds[0][0] == "time change, throughput change, throughput ratio"
    assert speeds[0][1].startswith("+")


def test_a_cell_under_two_names_is_not_compared_with_itself(store) -> None:
    resolved = resolved_run()
    for sweep in ("one", "two"):
        write_plan(store, [("same", resolved)], sweep=sweep)
        record_run(store, Recorded(resolved, cell="same", sweep=sweep))
    together = found(store, "one", "two")
    assert len(together.measured) == 2
    assert together.changes == ()
    assert together.within_policy == ()


def test_the_default_allocator_is_the_reference_wherever_it_stands(store) -> None:
    pool, plain = (resolved_run().model_copy(update={"engine": engine}) for engine in (POOL, PLAIN))
    measure(store, {"pool": (pool, 1.0, 0.0), "plain": (plain, 1.0, 0.0)}, runs=1)
    assert found(store).reference.name == "plain"
    document = build_document(found(store))
    (switches,) = [one for one in document.sections if one.anchor == "switches"]
    (table,) = [block.table for block in switches.blocks if hasattr(block, "table")]
    assert [row.cells[:3] for row in table.rows] == [
        ("plain", "storage_resize", "compared with"),
        ("pool", "max_pool, 2 slots", "the same bits"),
    ]


def test_of_several_heads_the_faster_one_is_named_with_its_price_and_so_are_the_others(store):
    arms = {
        "base": Arm(),
        "slow": Arm(slower=1.2),
        "fast": Arm(slower=0.8, more_bytes=1.1),
        "faster": Arm(slower=0.6, more_memory=1.2),
        "wrong": Arm(slower=0.5, loss_shift=1.0, more_memory=1.2),
        "same": Arm(),
    }
    record_arms(store, arms, noise=0.002)
    lines = said(found(store, "gate")).split("\n")
    assert lines[0] == "No recommendation: arm faster is faster than arm base, at a price."
    assert lines[1].startswith("step_time: improved in 3 of 3 cells, least in ")
    assert lines[2].startswith("memory: regressed in 3 of 3 cells, least in ")
    assert lines[3] == "faster at a price too: arm fast"
    assert lines[4].startswith("arm slow: step_time regressed in 3 of 3 cells")
    assert lines[5].startswith("arm wrong: ")
    assert lines[6] == "arm same: equivalent in all that is required"
