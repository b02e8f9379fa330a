"""Logs named as files: read like those of import, and what two runs make doubtful."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cli.baseline import SaveVerb
from bench.cli.compare import CompareVerb
from bench.cli.export import ExportVerb
from bench.cli.gate import GateVerb
from bench.cli.import_ import ImportVerb
from bench.errors import UsageError
from bench.importers.table import read_text
from bench.resolve.presets import PRESETS
from bench.workload import ImportedRun, ImportedStep, Provenance, Workload
from reports.compare.logs import flops_doubt, of_import
from reports.compare.unlike import trade_off
from reports.exports import FORMS
from reports.posts.pairs import changes, pairs, why_base

LINE = (
    "iteration {}/ 9 | elapsed time per iteration (ms): {} | throughput per GPU (TFLOP/s/GPU): 300."
    "0 | global batch size: 128 | lm loss: {} | grad norm: 1.5 |\n"
)
BASE = "".join(LINE.format(step, 800 + step, 2.5) for step in (3, 4, 5))
HEAD = "".join(LINE.format(step, 700 + step, 2.25) for step in (3, 4, 5))
TRAINER = "{{'loss': {}, 'grad_norm': 1.5, 'epoch': {}}}\n"


def compared(capsys, base, head=None, *, as_json=True, **options):
    verb = CompareVerb(base=str(base), head=None if head is None else str(head), **options)
    verb.run().show(as_json=as_json, form=verb.form)
    printed = capsys.readouterr().out
    return json.loads(printed) if as_json else printed


def test_two_logs_are_compared_without_a_folder_of_results(tmp_path: Path, capsys) -> None:
    base, head = tmp_path / "base.log", tmp_path / "head.log"
    base.write_text(BASE)
    head.write_text(HEAD)
    nowhere = tmp_path / "no-results"
    found = compared(capsys, base, head, results=nowhere)
    assert [one["name"] for one in found["side_by_side"]] == ["base", "head"]
    time = found["parity"]["changes"][0]
    assert (time["name"], time["base"], time["head"]) == ("step time, median", 804.0, 704.0)
    (loss, _) = found["parity"]["differences"]
    assert (loss["steps"], loss["largest"]) == (3, -0.25)
    assert not nowhere.exists()


def _golden(losses):
    values = {str(step): value for step, value in enumerate(losses, start=1)}
    about = {"start_step": 1, "end_step": 3, "step_interval": 1, "values": values}
    return json.dumps({"lm loss": about})


FIRST_TWO = "".join(BASE.splitlines(keepends=True)[:2])
NAN_ITERATION = LINE.replace("lm loss: {} |", "number of nan iterations: {} |")


@pytest.mark.parametrize(
    ("suffix", "base", "head", "step"),
    [
        ("log", BASE, FIRST_TWO + LINE.format(5, 805, "NAN"), "nan at step 5"),
        ("log", BASE, FIRST_TWO + NAN_ITERATION.format(5, 805, 1), "nan at step 5"),
        ("json", _golden([10.5, 2.5, 2]), _golden([10.5, "nan", "nan"]), "nan at step 2"),
        ("csv", "step,loss\n1,10.5\n2,2.5\n", "step,loss\n1,10.5\n2,inf\n", "inf at step 2"),
    ],
)
def test_a_loss_that_is_no_number_on_one_side_is_a_divergence(
    tmp_path: Path, capsys, suffix, base, head, step
) -> None:
    names = [tmp_path / f"base.{suffix}", tmp_path / f"head.{suffix}"]
    for name, text in zip(names, (base, head), strict=True):
        name.write_text(text)
    said = f"loss {step}, where the base has 2.5"
    seen = compared(capsys, *names)
    assert seen["outcome"] == f"head diverges from base: {said}"
    assert said.removeprefix("loss ") == seen["parity"]["differences"][0]["divergence"]
    text = compared(capsys, *names, as_json=False)
    assert text.startswith(f"head diverges from base: {said}")
    assert f"{step[:3]}, not 2.5" in text
    text = compared(capsys, *names, as_json=False, form="refresh").replace("*", "")
    assert f"{step[:3]}, not 2.5" in text
    assert "| diverges |" in text
    # The other way round the base is the one that has none; of two alike nothing diverges.
    assert f"2.5 at {step[7:]}, where the base has {step[:3]}" in str(
        compared(capsys, *names[::-1])
    )
    assert "outcome" not in compared(capsys, names[1], names[1])
    gate = GateVerb(sweep=str(names[1]), baseline=str(names[0]), results=tmp_path / "no").run()
    (loss,) = (row for row in gate.data["judgements"] if row["metric"] == "loss")
    assert (gate.code, loss["verdict"]) == (1, "regressed")
    assert loss["reason"] == said.removeprefix("loss ")


def test_a_gate_names_the_step_of_a_nan_that_later_steps_hide(tmp_path: Path) -> None:
    base, head = (tmp_path / f"{name}.csv" for name in ("base", "head"))
    for path, loss in ((base, 2.4), (head, "nan")):
        path.write_text(f"step,loss,milliseconds\n1,2.5,100\n2,{loss},100\n3,2.3,100\n")
    for sides, said in (((head, base), "nan at step 2, where the base has 2.4"),
                        ((base, head), "2.4 at step 2, where the base has nan")):  # fmt: skip
        gate = GateVerb(sweep=str(sides[0]), baseline=str(sides[1]), results=tmp_path / "no").run()
        assert gate.data["outcome"].endswith(f" regressed: loss (spread) {said}")


@pytest.mark.parametrize(("pr", "verdict"), [(2.4, "equivalent"), (2.6, "regressed")])
def test_losses_without_steps_are_compared_as_one_value(tmp_path: Path, pr, verdict) -> None:
    base, head = tmp_path / "base" / "page.md", tmp_path / "head" / "page.md"
    for path, loss in ((base, 2.4), (head, pr)):
        path.parent.mkdir()
        path.write_text(f"| run | loss |\n|---|---|\n| main | 2.5 |\n| PR | {loss} |\n")
    gate = GateVerb(sweep=str(head), baseline=str(base), results=tmp_path / "no").run()
    losses = [row["verdict"] for row in gate.data["judgements"] if row["metric"] == "loss"]
    assert losses == ["equivalent", verdict]


def test_of_a_pasted_table_the_side_that_diverges_is_named(tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.md"
    page.write_text("|step|main loss|PR loss|\n|-|-|-|\n|1|2.5|2.5|\n|2|2.4|nan|\n|3|2.3|nan|\n")
    text = compared(capsys, page, as_json=False)
    said = "page.pr diverges from page.main: loss nan at step 2, where the base has 2.4"
    assert text.startswith(said)
    assert "were dropped" not in text


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *((name, 100) for name in ("lm loss @100", "Loss @ 100", "Loss at step 100")),
        *(("Loss (step 100)", 100), ("loss_at_iteration_1k", 1000)),
        ("CE loss after step 1,000", 1000),
    ],
)
def test_a_row_of_a_loss_at_a_step_is_of_that_step(tmp_path: Path, capsys, name, step) -> None:
    page = tmp_path / "page.md"
    rows = (
        f"| step time (ms) | 100 | 90 |\n| {name} | 5.5 | NaN |\n| loss (step 2) | 7.5 | 7.25 |\n"
    )
    page.write_text(f"| | main | PR |\n|-|-|-|\n{rows}")
    found = compared(capsys, page)
    said = f"nan at step {step:,}, where the base has 5.5"
    assert found["outcome"] == f"page.pr diverges from page.main: loss {said}"
    assert found["bases"] == ["base: page.main (called 'main')"]
    (loss,) = found["parity"]["differences"]
    assert (loss["steps"], loss["last_step"]) == (2, step)
    assert "not understood" not in str(found)


TITAN = "step: {}  loss: {}  grad_norm:  4.5  memory: {}GiB(42.21%)  tps: {}  mfu: 6.58%\n"
TITAN_BASE = TITAN.format(1, 9.5, 30.5, 1123) + TITAN.format(2, 8.5, 40.5, 7812)


@pytest.mark.parametrize(
    ("base", "head", "policy", "code", "verdict"),
    [
        (TITAN_BASE, TITAN_BASE, "", 0, "equivalent"),
        (TITAN_BASE, TITAN_BASE.replace("40.5", "41.5"), "", 1, "regressed"),
        (TITAN_BASE, TITAN_BASE.replace("8.5", "nan"), "", 1, "equivalent"),
        (TITAN_BASE, TITAN_BASE, "step_time: {}", 3, "equivalent"),
        ("step,loss,milliseconds\n1,2.5,9\n", "step,loss\n1,2.5\n", "", 3, "unmeasured"),
        ("step,milliseconds\n1,9\n", "step,loss\n1,2.5\n", "", 3, "unmeasured"),
        ("step,tps\n1,9\n", "step,tps\n1,9\n", "", 3, "unmeasured"),
    ],
)
def test_times_that_no_log_states_decide_nothing(
    tmp_path: Path, base, head, policy, code, verdict
) -> None:
    names = [tmp_path / "base.log", tmp_path / "head.log"]
    for name, text in zip(names, (base, head), strict=True):
        name.write_text(text)
    rules = tmp_path / "gates.yaml"
    rules.write_text(f"metrics: {{{policy}}}\n")
    results = tmp_path / "results"
    SaveVerb(name="main", sweep=str(names[0]), results=results).run()
    options = {"policy": rules} if policy else {}
    gate = GateVerb(sweep=str(names[1]), baseline="main", results=results, **options).run()
    rows = {row["metric"]: row for row in gate.data["judgements"]}
    assert (gate.code, rows["memory"]["verdict"]) == (code, verdict)
    assert rows["step_time"]["verdict"] == "unmeasured"
    assert verdict == "unmeasured" or rows["memory"]["detail"] == "reserved peak"
    assert code or gate.data["outcome"].startswith("PASSED, time not decided")


def test_a_kept_run_whose_loss_is_no_number_is_imported_twice_and_exported(
    store, tmp_path: Path
) -> None:
    log = tmp_path / "bad.csv"
    log.write_text("step,loss,milliseconds\n1,2.5,9\n2,nan,9\n3,,9\n")
    first, again = (ImportVerb(logs=(str(log),), results=store.root).run() for _ in range(2))
    assert str(first.data) == str(again.data)
    for form in FORMS.keys() - {"asv"}:  # which wants a commit
        ExportVerb(form=form, out=tmp_path / "out", results=store.root).run()
    golden = tmp_path / "out" / "golden_values_bad.json"
    assert json.loads(golden.read_text())["lm loss"]["values"] == {"1": 2.5, "2": "nan"}


def test_a_difference_at_step_zero_is_the_first(tmp_path: Path, capsys) -> None:
    base, head = tmp_path / "base.csv", tmp_path / "head.csv"
    base.write_text("step,loss\n0,2.5\n1,2.5\n")
    head.write_text("step,loss\n0,2.75\n1,2.5\n")
    text = compared(capsys, base, head, as_json=False, form="refresh")
    assert "| loss | 2 of 2 | 0 | +10.000000 % |" in text.replace("*", "")


def test_of_one_text_every_run_stands_against_the_first(tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.md"
    blocks = [(f"**{name}** (as run):\n\n```\n", loss) for name, loss in
              (("before", 1.5), ("after", 1.25), ("again", 1.5))]  # fmt: skip
    lines = [TRAINER.format(loss - at / 8, at / 8) for _, loss in blocks for at in (1, 2)]
    heads = [head for head, _ in blocks]
    page.write_text("".join(
        f"{head}{lines[2 * at]}{lines[2 * at + 1]}```\n\n" for at, head in enumerate(heads)
    ))  # fmt: skip
    found = compared(capsys, page)
    with pytest.raises(UsageError, match="name HEAD"):
        compared(capsys, page, form="refresh")
    with pytest.raises(UsageError, match="--arm is for sweeps, and a log is named"):
        compared(capsys, page, page, arms=("base=main",))
    assert [one["label"] for one in found["side_by_side"]] == [
        "before (as run)", "after (as run)", "again (as run)",
    ]  # fmt: skip
    assert found["parity"]["differences"][0]["largest"] == -0.25
    (further,) = found["further"]
    assert further["differences"][0]["largest"] == 0.0
    text = compared(capsys, page, as_json=False)
    assert text.startswith("base: page.before (called 'before (as run)')")
    page.write_text(page.read_text().replace("before", "earlier"))
    first = "base: page.earlier (the first; none is called main, base or before)"
    assert compared(capsys, page)["bases"] == [first]
    page.write_text(page.read_text().replace("earlier", "no after").split("**again")[0])
    without = "base: page.after ('no after (as run)' is without it)"
    assert compared(capsys, page)["bases"] == [without]
    assert text.index("page.after against page.before") < text.index(
        "page.again against page.before"
    )


def test_of_one_text_the_run_called_main_is_the_base(tmp_path: Path, capsys) -> None:
    path = tmp_path / "page.csv"
    path.write_text("Step,pr - loss,main - loss\n1,2.5,2.5\n2,2.25,2.5\n")
    (loss,) = compared(capsys, path)["parity"]["differences"]
    assert loss["largest"] == -0.25
    table = "| | x | main |\n|-|-|-|\n| step time (ms) | 90 | 100 |\n\n"
    log = "".join(f"# {name}\n{text}" for name, text in (("old", BASE), ("new", HEAD)))
    path = tmp_path / "page.md"
    path.write_text(table + log)
    found = compared(capsys, path)
    (table_time,), (log_time, *_) = (one["changes"] for one in (found["parity"], *found["further"]))
    assert (table_time["base"], table_time["head"]) == (100.0, 90.0)
    assert (log_time["base"], log_time["head"]) == (804.0, 704.0)


COLUMNS = {
    "PR loss,main loss\n2.51,2.5\n2.42,2.4\n": [("main", "pr", 2)],
    "fsdp2 loss,mfsdp loss,diff\n2.5,2.51,0.1\n2.4,2.42,0.2\n": [("fsdp2", "mfsdp", 2)],
    "config,PR loss,main loss\na,2.51,2.5\nb,2.42,2.4\n": [
        ("a-main", "a-pr", 1), ("b-main", "b-pr", 1),
    ],
    ",PR mem (GiB),main mem (GiB)\n8B,40,42\n70B,60,61\n": [
        ("8b-main", "8b-pr", 1),
        ("70b-main", "70b-pr", 1),
    ],
    "config,main tokens/s,PR tokens/s,PR mfu,main mfu\na,64000,66000,41,42\n": [
        ("a-main", "a-pr", 1),
    ],
    "gpus,Baseline: peak mem (GB),This PR: peak mem (GB)\n8,61,58\n16,40,38\n": [
        ("baseline", "this-pr", 1), ("baseline-2", "this-pr-2", 1),
    ],
    "chunks,fsdp2 loss,mfsdp loss\n1,2.51,2.5\n2,,2.4\n4,,2.3\n": [("fsdp2", "mfsdp", 1)],
    "config,step,main loss,PR loss\na,1,2.5,\na,2,2.4,2.6\nb,1,3.5,3.6\nb,2,3.4,3.6\n": [
        ("a-main", "a-pr", 1), ("b-main", "b-pr", 2),
    ],
}  # fmt: skip


@pytest.mark.parametrize("text", COLUMNS)
def test_columns_of_two_sides_are_compared_within_their_rows(tmp_path, capsys, text) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    found = compared(capsys, path)
    names = [run["name"].removeprefix("t.") for run in found["side_by_side"]]
    pairs = [found["parity"], *found.get("further", ())]
    steps = [len(pair["changes"]) or pair["differences"][0]["steps"] for pair in pairs]
    assert steps == [count for *_, count in COLUMNS[text]]
    said = compared(capsys, path, as_json=False)
    for base, head, _ in COLUMNS[text]:
        assert {base, head} <= {*names}
        assert len(pairs) == 1 or f"t.{head} against t.{base}" in said


def test_a_log_stands_beside_a_run_that_is_kept(store, tmp_path: Path, capsys) -> None:
    steps = (ImportedStep(3, milliseconds=402.0, loss=2.5),)
    log = Provenance(kind="imported", source="kept")
    store.imports.write(ImportedRun("kept", Workload(framework="x"), log, steps))
    path = tmp_path / "head.log"
    path.write_text(BASE)
    found = compared(capsys, "kept", path, results=store.root)
    assert [one["name"] for one in found["side_by_side"]] == ["kept", "head"]
    assert found["parity"]["changes"][0]["head"] == 804.0


@pytest.mark.parametrize(
    ("time", "memory", "says"),
    [
        (0.9, 1.125, "faster, but with more memory: time -10.00 %, peak of a device +12.50 %"),
        (1.5, 0.5, "less memory, but slower: time +50.00 %, peak of a device -50.00 %"),
        (0.9, 0.9, ""), (1.1, 1.1, ""), (0.995, 1.5, ""), (0.5, 1.005, ""), (None, 1.5, ""),
        (0.5, None, ""),
    ],
)  # fmt: skip
def test_what_speed_or_memory_is_bought_with_is_said(time, memory, says: str) -> None:
    assert trade_off(time, memory) == says


def run(model: str | None, seq_len: int | None, ranks: int | None, *, rate: float = 268.8):
    """Numbers of Megatron-LM pull request 3067: Llama 8B, 1K, on one node of 8."""
    work = Workload(framework="x", model=model, seq_len=seq_len, ranks=ranks, global_batch=128)
    steps = (ImportedStep(100, milliseconds=2793.4, teraflops_per_device=rate),)
    return of_import(ImportedRun("main", work, Provenance(kind="imported"), steps))


def test_a_named_model_and_its_rate_imply_what_is_not_stated() -> None:
    implied = "main: the FLOP formula gives sequence length 1,024 on 8 devices (Llama 8B, global"
    assert flops_doubt(run("Llama 8B", 1024, None), PRESETS).startswith(implied)
    assert flops_doubt(run("Llama 8B", None, 8), PRESETS).startswith(implied)
    assert flops_doubt(run("Llama 8B", 1024, 8), PRESETS) == ""


def test_what_is_stated_and_contradicts_the_rate_is_said() -> None:
    said = flops_doubt(run("Llama 8B", 1024, 16), PRESETS)
    assert "contradicts the FLOP formula: sequence length 1,024 on 16 devices would be 0.50" in said
    assert flops_doubt(run("Llama 8B", 1024, 8, rate=268.8 * 1.015), PRESETS) == ""
    assert "contradicts" in flops_doubt(run("Llama 8B", 1024, 8, rate=268.8 * 1.025), PRESETS)


def test_no_model_is_invented() -> None:
    for model in (None, "a sparse model", "Llama 9B", "Qwen3-8B"):
        assert flops_doubt(run(model, 1024, None), PRESETS) == ""
        assert flops_doubt(run(model, None, None), PRESETS) == ""
    # No number of devices that is a power of two is within 2 %.
    assert flops_doubt(run("Llama 8B", 1024, None, rate=200.0), PRESETS) == ""


def paired(table: str) -> tuple[list[ImportedRun], list[tuple[str, str, float | None]]]:
    """The runs of a table, lines apart by semicolons, and the pairs with the ratio of times."""
    header, *rows = (line.strip() for line in table.split(";"))
    page = "\n".join((header, "|".join("-" * (header.count("|") + 1)), *rows)) + "\n"
    runs = read_text("page", [page.encode()], None, {})
    both = pairs([of_import(run) for run in runs], alike=False)
    told = [
        (*(run.run.provenance.label for run in pair), changes(pair).get("time")) for pair in both
    ]
    return runs, told


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (
            "branch|dtype|step time (ms); main|bf16|100; main|fp32|300; PR|bf16|100; PR|fp32|300",
            [("main bf16", "PR bf16", 1.0), ("main fp32", "PR fp32", 1.0)],
        ),
        (
            "dtype|branch|step time (ms); bf16|PR|100; fp32|PR|300; bf16|main|100; tf32|main|300",
            [("main bf16", "PR bf16", 1.0)],
        ),
        (
            "ZeRO|branch|step time (ms); 1|main|100; 3|main|300; 1|PR|100; 3|PR|300",
            [("main ZeRO 1", "PR ZeRO 1", 1.0), ("main ZeRO 3", "PR ZeRO 3", 1.0)],
        ),
        (
            "branch|seq_len|step time (ms); main|4096|100; main|8192|300; PR|4096|100; PR|8192|300",
            [
                ("main seq_len 4096", "PR seq_len 4096", 1.0),
                ("main seq_len 8192", "PR seq_len 8192", 1.0),
            ],
        ),
        (
            "layers|branch|step time (ms); 12|main|100; 12|PR|100; 24|main|300; 24|PR|300",
            [("main layers 12", "PR layers 12", 1.0), ("main layers 24", "PR layers 24", 1.0)],
        ),
        (
            "run|step time (ms); main bf16|100; main fp32|300; PR bf16|100; PR fp32|300",
            [("main bf16", "PR bf16", 1.0), ("main fp32", "PR fp32", 1.0)],
        ),
        (
            "branch | commit | step time (ms); main | abc | 100; PR | def | 50",
            [("main abc", "PR def", 0.5)],
        ),
        (
            "branch | dtype | step time (ms); main | bf16 | 100; PR | bf16 | 50; PR | fp32 | 300",
            [("main bf16", "PR bf16", 0.5)],
        ),
    ],
)
def test_a_row_is_compared_with_the_row_of_the_base_that_is_alike(table, told) -> None:
    runs, found = paired(table)
    assert found == told
    compared_runs = {name for base, head, _ in told for name in (base, head)}
    for run in runs:
        is_alone = "not comparable: no row of the base is like it" in run.provenance.remarks
        is_base = run.provenance.label.startswith("main")
        assert is_alone == (run.provenance.label not in compared_runs and not is_base)


@pytest.mark.parametrize(
    ("bases", "said"),
    [
        ("main | 100; main | 110", "called 'main', as 2 runs are: the last above its head; name"),
        ("main | 100", "called 'main'"),
    ],
)
def test_of_rows_that_are_called_alike_the_base_says_which_it_is(bases: str, said: str) -> None:
    runs, _ = paired(f"branch | step time (ms); {bases}; PR | 90; PR | 95")
    shown = [of_import(run) for run in runs]
    whys = {why_base(pair, shown) for pair in pairs(shown, alike=False)}
    assert [why.startswith(said) for why in whys] == [True]
    assert ("name them apart" in whys.pop()) == (";" in bases)


@pytest.mark.parametrize(
    "name",
    [
        *("Δ", "diff", "difference", "delta", "ratio", "relative", "speedup", "change", "std"),
        *("improvement", "tolerance", "pass", "p-value", "PR std", "diff (%)", "change vs main"),
    ],
)
def test_a_summary_is_no_run(name: str) -> None:
    for table in (
        f"metric | main | PR | {name}; loss | 2.5 | 2.0 | 0.5; step time (ms) | 100 | 50 | 5",
        f"variant | step time (ms) | loss; main | 100 | 2.5; PR | 50 | 2.0; {name} | 5 | 0.5",
    ):
        runs, found = paired(table)
        assert found == [("main", "PR", 0.5)]
        assert f"no runs, as their names say: {name}" in runs[0].provenance.remarks


@pytest.mark.parametrize("name", ["this change", "with diff", "forward pass", "exchange"])
def test_a_run_may_be_called_nearly_as_a_summary(name: str) -> None:
    _, found = paired(f"variant | step time (ms); main | 100; {name} | 50")
    assert found == [("main", name, 0.5)]


@pytest.mark.parametrize("name", ["exp", "experiment", "candidate", "ours", "new", "patched"])
def test_a_column_next_to_the_base_is_the_other_side(name: str) -> None:
    runs, _ = paired(f"iteration | loss (base) | loss ({name}); 10 | 7.5 | 7.25")
    assert [run.provenance.label for run in runs] == ["base", name]
    assert [run.steps[0].loss for run in runs] == [7.5, 7.25]
