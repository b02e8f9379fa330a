"""Loss parity: groups, bounds, verdicts, and where two curves part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from recorded_runs import Recorded, findings_of, record_run, recorded_cell, resolved_run

from bench.spec import DataSpec, ResolvedDtypes, TrainSpec
from reports.compare.parity import losses, parity_groups, tolerance_for, wire_verdicts
from reports.posts.pull_request import pull_request
from reports.renderers.document import Paragraph
from reports.sections.parity import parity_section
from reports.views.cells import make_cell

TRAIN = TrainSpec(steps=20, global_batch=4, micro_batch=2, seq_len=128, warmup_steps=5)


def verdicts(groups):
    return {row.cell.name: row.verdict for group in groups for row in group.rows}


def of_two(store, resolved=None, **changes):
    """Groups of ddp and another cell. changes: of the second."""
    one = recorded_cell(store, "a", resolved_run("ddp", "no_shard"))
    return parity_groups(
        [recorded_cell(store, "b", resolved or resolved_run("mfsdp", "optim"), **changes), one]
    )


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({"data": DataSpec(kind="text", seed=1)}, 2),
        ({"train": TRAIN.model_copy(update={"lr": 1e-3})}, 2),
        ({"train": TRAIN.model_copy(update={"global_batch": 8})}, 2),
        ({"dtype": "bf16", "comm": "bf16"}, 2),
        # The same problem cut differently.
        ({}, 1),
        ({"ranks": 4}, 1),
        ({"train": TRAIN.model_copy(update={"micro_batch": 1})}, 1),
        ({"recompute": "full"}, 1),
    ],
)
def test_cells_of_one_problem_and_one_dtype_policy_are_compared(store, changes, groups):
    found = of_two(store, resolved_run("mfsdp", "optim", **changes))
    assert len(found) == groups
    if groups == 2:
        assert set(verdicts(found).values()) == {"nothing to compare with"}
    elif not changes:
        assert verdicts(found) == {"a": "reference", "b": "parity"}


def test_sums_in_another_precision_are_compared_and_said(store):
    cells = []
    for name, engine, sums in (("a", "fsdp2", "fp32"), ("b", "mfsdp", None)):
        run = resolved_run(engine, "optim", dtype="bf16", comm="bf16")
        dtypes = run.dtypes.model_copy(update={"reduce": sums})
        cells.append(recorded_cell(store, name, run.model_copy(update={"dtypes": dtypes})))
    (group,) = parity_groups(cells)
    assert verdicts([group]) == {"a": "reference", "b": "parity"}
    assert "sums" not in group.label
    assert group.sums == {"fp32": ["a"], "bf16": ["b"]}
    _, _, said, *_ = parity_section(SimpleNamespace(parity=(group,), wires=(), cells=tuple(cells)))
    assert "precision of sums over ranks: fp32 in a; bf16 in b" in said.text


def test_cells_with_gradients_in_other_dtypes_have_one_reference_and_verdicts_by_name(store):
    def of(outer: int, wire: str, sums: str | None = None, **changes):
        run = resolved_run(dtype="bf16", comm=wire, ranks=4)
        engine = {"outer_size": outer, "outer_strategy": "optim" if outer > 1 else "no_shard"}
        changed = {
            "engine": run.engine.model_copy(update=engine),
            "dtypes": run.dtypes.model_copy(update={"reduce": sums}),
        }
        return Recorded(run.model_copy(update=changed), noise=0.0, **changes)

    larger = TRAIN.model_copy(update={"global_batch": 8})
    cells = {
        "bf16": of(1, "bf16", loss_shift=5e-4),
        "fp32": of(1, "fp32"),
        "wide": of(1, "bf16", "fp32", loss_shift=1e-4),
        "hfsdp-fp32": of(2, "fp32"),
        "hfsdp-bf16": of(2, "bf16", loss_shift=1.1e-2),
        "other batch": Recorded(resolved_run(dtype="bf16", comm="bf16", train=larger)),
    }
    found = findings_of(store, cells)
    (group,) = found.wires
    assert group.reference.name == "fp32"
    assert group.tolerance.bound == 2.0**-8
    assert wire_verdicts(group) == [
        "FSDP, BF16 wire: equal within 5.0e-04 (bound 3.9e-03)",
        "FSDP, BF16 wire, FP32 sums: equal within 1.0e-04 (bound 3.9e-03)",
        "HFSDP, FP32 wire: equal (bound 3.9e-03)",
        "HFSDP, BF16 wire: loss differs from step 1, losses by 1.1e-02 (bound 3.9e-03)",
    ]
    texts = [block.text for block in parity_section(found) if isinstance(block, Paragraph)]
    assert any(text.startswith("Across dtypes of gradients, against fp32: FSDP") for text in texts)
    assert "FSDP, BF16 wire: equal within" in pull_request(store, ["quickstart"])


@pytest.mark.parametrize("engine", ["mfsdp", "fsdp2"])
def test_a_shifted_loss_diverges_at_the_first_step_beyond_the_bound(store, engine):
    (group,) = of_two(store, resolved_run(engine, "optim"), loss_shift=1e-3)
    assert (group.reference.name, group.tolerance.bound) == ("a", 1e-5)
    (row,) = [one for one in group.rows if one.cell.name == "b"]
    assert (row.verdict, row.first_divergent_step) == ("diverges", 1)
    assert row.max_relative == pytest.approx(1e-3, rel=0.05)


def test_a_cell_whose_losses_agree_and_gradient_norms_do_not_diverges(store):
    (group,) = of_two(store, norm_scale=4.0)
    (row,) = [one for one in group.rows if one.cell.name == "b"]
    assert (row.verdict, row.moved, row.first_divergent_step) == ("diverges", "gradient norm", 1)
    assert row.max_relative < group.tolerance.bound
    assert row.norms == pytest.approx((3.0, 3.0))


@pytest.mark.parametrize("changes", [{"steps": 15}, {"state": "nan"}])
def test_a_failed_cell_and_one_that_lacks_steps_take_no_part(store, changes):
    assert list(verdicts(of_two(store, **changes))) == ["a"]


def test_the_worst_of_several_runs_decides(store):
    base = recorded_cell(store, "a", resolved_run("ddp", "no_shard"))
    for repeat, shift in enumerate((0.0, 1e-3, 0.0)):
        record_run(
            store,
            Recorded(resolved_run("mfsdp", "optim"), sweep="b", repeat=repeat, loss_shift=shift),
        )
    other = make_cell("b", store.records(sweep="b"))
    (group,) = parity_groups([base, other])
    assert group.rows[1].verdict == "diverges"
    assert group.repeat_spread == pytest.approx(1e-3, rel=0.05)


def bf16_cells(store, *shifts):
    """ddp, fsdp2 and mfsdp in bf16, the last two shifted."""
    engines = (("ddp", "no_shard"), ("fsdp2", "optim_grads_params"), ("mfsdp", "optim"))
    return [
        recorded_cell(
            store,
            engine,
            resolved_run(engine, strategy, dtype="bf16", comm="bf16"),
            loss_shift=shift,
        )
        for (engine, strategy), shift in zip(engines, (0.0, *shifts), strict=True)
    ]


@pytest.mark.parametrize(
    ("shifts", "low", "high", "found"),
    [
        # What established engines differ by is noise, up to four roundoffs: a broken one is no
        # yardstick.
        ((4e-3, 7e-3), 2**-8 + 1e-9, 1.0, {"fsdp2": "parity", "mfsdp": "parity"}),
        ((0.0, 0.02), 0.0, 3 * 2**-8, {"fsdp2": "parity", "mfsdp": "diverges"}),
        ((0.5, 0.1), 4 * 2**-8, 4 * 2**-8, {"fsdp2": "diverges", "mfsdp": "diverges"}),
    ],
)
def test_what_established_engines_differ_among_themselves_widens_a_low_precision_bound(
    store, shifts, low, high, found
):
    (group,) = parity_groups(bf16_cells(store, *shifts))
    assert low <= group.tolerance.bound <= high
    assert verdicts([group]) == {"ddp": "reference", **found}
    if shifts[0] == 4e-3:
        assert "established engines (ddp, fsdp2)" in group.tolerance.derivation
    ddp, _, mfsdp = (row.cell for row in group.rows)
    (without,) = parity_groups([ddp, mfsdp])  # the engine under test never widens its own bound
    assert without.tolerance.bound == 2**-8


def dtypes(compute, main="fp32", grads="fp32", comm="fp32"):
    return resolved_run(
        dtypes=ResolvedDtypes(compute=compute, main_params=main, main_grads=grads, grad_comm=comm)
    )


@pytest.mark.parametrize(
    ("resolved", "bound"),
    [
        (dtypes("fp32"), 1e-5),
        (dtypes("fp64", "fp64", "fp64", "fp64"), 1e-10),
        (dtypes("fp64"), 1e-5),
        (dtypes("bf16"), 2**-8),
        (dtypes("fp32", comm="bf16"), 2**-8),
        (dtypes("fp16"), 2**-11),
        (dtypes("fp16", comm="bf16"), 2**-8),
        (dtypes("bf16", main=None), 2**-8),
    ],
)
def test_the_coarsest_dtype_of_a_policy_sets_its_bound(resolved, bound):
    tolerance = tolerance_for(resolved)
    assert tolerance.bound == bound
    assert tolerance.derivation


@pytest.mark.parametrize(
    ("optimizer", "shift", "verdict"),
    [
        ("adamw", 2e-5, "diverges"),
        # Newton-Schulz in BF16 rounds what training moved the loss by, and no more of it.
        ("muon", 2e-5, "parity"),
        ("muon", 2e-2, "diverges"),
    ],
)
def test_losses_of_muon_may_differ_by_a_rounding_of_what_its_updates_did(
    store, optimizer, shift, verdict
):
    runs = (resolved_run("mfsdp", "optim"), resolved_run("ddp", "no_shard"))
    shifts = {"b": shift, "a": 0.0}
    train = runs[0].train.model_copy(update={"optimizer": optimizer})
    cells = [
        recorded_cell(store, name, run.model_copy(update={"train": train}), loss_shift=moved)
        for (name, moved), run in zip(shifts.items(), runs, strict=True)
    ]
    (group,) = parity_groups(cells)
    assert verdicts([group]) == {"a": "reference", "b": verdict}
    values = [*losses(cells[1].runs[0].record).values()]
    moved = max(abs(1 - values[0] / value) for value in values) if optimizer == "muon" else 0.0
    assert group.tolerance.bound == pytest.approx(1e-5 + 2**-8 * moved)


@pytest.mark.parametrize(
    ("start", "verdict"),
    [
        ({"norm": "01", "head": "0a"}, "parity"),
        ({"norm": "01", "head": "0b"}, "other start"),
        ({"norm": "unequal", "head": "0a"}, "other start"),
        # What a side does not say is no difference.
        ({}, "parity"),
    ],
)
def test_cells_that_begin_with_other_bits_have_another_start(store, start, verdict):
    def of(engine, strategy, start):
        runtime = {"python": "3.11.8", "start": start}
        return Recorded(resolved_run(engine, strategy), environment={"runtime": runtime})

    first = of("ddp", "no_shard", {"norm": "01", "head": "0a"})
    found = findings_of(store, {"a": first, "b": of("mfsdp", "optim", start)})
    assert verdicts(found.parity) == {"a": "reference", "b": verdict}
    (row,) = found.parity[0].compared
    if verdict == "other start":
        assert row.moved == ("norm" if start["norm"] == "unequal" else "head")
