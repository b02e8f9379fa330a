"""Formats as data: each is read, also coloured, wrapped, behind prefixes and among others."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from format_texts import MEGATRON, SAMPLES, TRAINER

from bench.errors import NothingMeasuredError, UsageError
from bench.importers.formats import shipped
from bench.importers.table import read_text
from bench.workload import ImportedRun, ImportedStep

WRAPPABLE = sorted(SAMPLES.keys() - {"composer", "deepspeed", "jsonl", "trainer"})


def runs_of(text: str, form: str | None = None) -> list[ImportedRun]:
    return read_text("page", [text.encode()], form, {})


def values(step: ImportedStep) -> dict[str, Any]:
    return dataclasses.asdict(step) | step.extra


def numbers(text: str) -> list[dict[str, Any]]:
    """Of the only run, without the lines where they stand."""
    (run,) = runs_of(text)
    return [{name: one for name, one in values(step).items() if name != "lines"}
            for step in run.steps]  # fmt: skip


def test_every_row_has_a_text_at_most_forty_lines_and_its_source() -> None:
    rows = {row.name: row for row in shipped()}
    assert rows.keys() == SAMPLES.keys() | {"table", "tracker"}
    for path in (Path(read_text.__code__.co_filename).parent / "rows").iterdir():
        assert len(path.read_text().splitlines()) <= 40, path.name
        assert all(rows[path.stem].source)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_lines_of_a_format_are_read_by_its_row(name: str) -> None:
    text, steps = SAMPLES[name]
    (run,) = runs_of(text + "\n")
    assert run.provenance.importer == name
    assert [step.step for step in run.steps] == [at for at, _ in steps]
    for step, (_, wanted) in zip(run.steps, steps, strict=True):
        told = values(step)
        assert {key: told.get(key) for key in wanted} == wanted
    assert not any("not understood" in one for one in run.provenance.remarks)


PREFIXES = ("[rank3]:", "3: ", "[default3]:", "[1,3]<stdout>:", "node-7: 3: ", "(Worker pid=3) ",
            "2026-01-01T00:00:00.0000000Z ", "stdout: ")  # fmt: skip
COLOURS = (
    "\x1b[31m",
    "[31m",
    "[38;2;180;60;0m",
    "^[[1;31m",
    "\\x1b[32m",
    "\\u001b[0m",
    "\ufffd[0m",
)


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"composer", "jsonl"}))
@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_stands_before_a_line_is_passed_over(name: str, prefix: str) -> None:
    text = SAMPLES[name][0]
    assert numbers("\n".join(prefix + line for line in text.split("\n"))) == numbers(text)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("colour", COLOURS)
def test_colours_are_taken_away_also_without_their_escape_byte(name: str, colour: str) -> None:
    text = SAMPLES[name][0]
    painted = text.replace(": ", f": {colour}").replace("loss", f"{colour}loss")
    assert numbers(painted) == numbers(text)
    assert numbers(text.replace("\n", f"{colour}\n{colour}") + colour) == numbers(text)


@pytest.mark.parametrize("name", WRAPPABLE)
@pytest.mark.parametrize("width", [60, 79, 80, 100, 132])
def test_a_line_that_was_wrapped_says_the_same(name: str, width: int) -> None:
    text = SAMPLES[name][0]
    lines = text.split("\n")
    hard = [line[at : at + width] for line in lines for at in range(0, len(line), width)]
    assert numbers("\n".join(hard)) == numbers(text)
    soft = [part for line in lines for part in textwrap.wrap(line, width)]
    assert numbers("\n".join(soft)) == numbers(text)


def test_a_number_that_may_go_on_below_is_dropped_aloud() -> None:
    text = "completed step: 9, seconds: 5.625, Tokens/s/device: 867.5, loss: 10.37\n5\nsaved\n"
    (run,) = runs_of(text)
    assert (run.steps[0].milliseconds, run.steps[0].loss) == (5625.0, None)
    assert any("loss 10.37, which may go on below" in one for one in run.provenance.remarks)
    (whole,) = runs_of(text.replace("\n5\n", "\n5 checkpoints\n"))
    assert whole.steps[0].loss == 10.37


def steps_of(*numbers: int, offset: float = 0.0) -> str:
    rows = ((at, 32 * at, 800.0 + at + offset, 400.0, 2.5, 1.0) for at in numbers)
    return "".join(MEGATRON.format(*row) + "\n" for row in rows)


BEGIN_AGAIN: dict[str, tuple[str, list[list[int]]]] = {
    "twice": (steps_of(1, 2, 3) + steps_of(1, 2, 3, offset=9), [[1, 2, 3], [1, 2, 3]]),
    "three times": (steps_of(5, 6) * 3, [[5, 6], [5, 6], [5, 6]]),
    "of other lengths": (steps_of(1, 2, 3, 4) + steps_of(1, 2), [[1, 2, 3, 4], [1, 2]]),
    "before the first": (steps_of(3, 4) + steps_of(1, 2), [[3, 4], [1, 2]]),
    "with words between": (steps_of(1, 2) + "bye\n" * 9 + steps_of(1, 2), [[1, 2], [1, 2]]),
    "resumed": (steps_of(1, 2, 3) + steps_of(2, 3, 4, offset=9), [[1, 2, 3, 4]]),
    "printed twice": (steps_of(1, 1, 2, 2), [[1, 2]]),
    "epochs": (
        "\n".join(TRAINER.format(1.5, 4.0, epoch) for epoch in (0.1, 0.2, 0.1, 0.2, 0.3)),
        [[1, 2], [1, 2, 3]],
    ),
    "ranks one after another": (
        "".join(f"{rank}: {line}\n" for rank in (0, 1) for line in steps_of(1, 2).splitlines()),
        [[1, 2]],
    ),
    "ranks of torchrun": (
        "".join(
            f"[rank{rank}]:{line}\n" for rank in (0, 1) for line in steps_of(1, 2).splitlines()
        ),
        [[1, 2]],
    ),
}


@pytest.mark.parametrize("kind", BEGIN_AGAIN)
def test_steps_that_begin_again_are_a_run_of_their_own(kind: str) -> None:
    text, wanted = BEGIN_AGAIN[kind]
    runs = runs_of(text)
    assert [[step.step for step in run.steps] for run in runs] == wanted
    assert len({run.id for run in runs}) == len(runs)
    for run in runs[1:]:
        assert any("steps begin again at line" in one for one in run.provenance.remarks)


LABELS: dict[str, tuple[str, str]] = {
    "**1. before** (as expected):": ("1. before (as expected)", "1-before"),
    "**before**: eager, fp32": ("before: eager, fp32", "before-eager-fp32"),
    "__before it__ on one node": ("before it on one node", "before-it-on-one-node"),
    "## before (main)": ("before (main)", "before"),
    "- **before** is the one above": ("before is the one above", "before-is-the-one-above"),
    "<summary>before</summary>": ("before", "before"),
    "<details><summary><b>before</b> (log)</summary>": ("before (log)", "before"),
    "<h3>before</h3>": ("before", "before"),
    "> **before**": ("before", "before"),
    "1. before": ("before", "before"),
}


@pytest.mark.parametrize("line", LABELS)
def test_a_label_may_have_words_behind_it(line: str) -> None:
    label, name = LABELS[line]
    block = f"{line}\n\n```\n{steps_of(1, 2)}```\n\n"
    first, second = runs_of(block + block.replace("before", "after"))
    assert (first.provenance.label, first.id) == (label, name)
    assert second.provenance.label == label.replace("before", "after")


TWO = (
    ("812.5", 812.5), ("812.5/815.0", 812.5), ("812.5 / 815.0", 812.5),
    ("812.5 (avg 815.0)", 812.5), ("812.5(815.0)", 812.5), ("1,812.5/1,815.0", 1812.5),
    ("812.5ms/815.0ms", 812.5), ("0.8125s", 812.5), ("8.125e2", 812.5), ("812.5/815.0/gpu", 812.5),
)  # fmt: skip


@pytest.mark.parametrize(("text", "first"), TWO)
def test_of_two_numbers_the_time_of_the_step_is_the_first(text: str, first: float) -> None:
    lines = [MEGATRON.format(at, 9, text, text, 2.5, 1.0) for at in (3, 4)]
    (run,) = runs_of("\n".join(lines).replace("(TFLOP/s/GPU): 0.8125s", "(TFLOP/s/GPU): 1"))
    assert [step.milliseconds for step in run.steps] == [first, first]
    if "815" in text:
        told = values(run.steps[0])
        assert told["elapsed time per iteration (ms), mean"] in (815.0, 1815.0, "815.0 ms")


UNREAD = ("800 to 900", "about 800", "800;900", "80%", "+3.5%", "800,5", "1.2.3", "8OO", "1/2/3",
          "800 <- 900")  # fmt: skip


@pytest.mark.parametrize("text", UNREAD)
def test_a_field_that_stands_in_two_forms_has_no_number(text: str) -> None:
    lines = [MEGATRON.format(at, 9, "800.5", 400.0, 2.5, 1.0) for at in range(3, 7)]
    lines += [MEGATRON.format(at, 9, text, 400.0, 2.5, 1.0) for at in range(7, 9)]
    (run,) = runs_of("\n".join(lines))
    assert [step.loss for step in run.steps] == [2.5] * 6
    if text == "+3.5%":
        assert [step.milliseconds for step in run.steps] == [800.5] * 4 + [None] * 2
        assert run.steps[-1].extra["elapsed time per iteration (ms) (difference)"] == "+3.5%"
        return
    assert {step.milliseconds for step in run.steps} == {None}
    assert run.provenance.remarks[0].startswith("milliseconds stands in several forms, of which 2")
    assert "step times" in run.provenance.absent


def test_one_damaged_line_of_many_does_not_take_the_others() -> None:
    lines = [MEGATRON.format(at, 9, "800.5", 400.0, 2.5, 1.0) for at in range(3, 40)]
    lines[5] = lines[5].replace("800.5", "8<00.5")
    (run,) = runs_of("\n".join(lines))
    assert sum(step.milliseconds == 800.5 for step in run.steps) == 36
    assert any("milliseconds 8<00.5 (line 6)" in one for one in run.provenance.remarks)


def test_a_field_that_is_not_understood_is_named_with_its_count() -> None:
    lines = steps_of(1, 2, 3).replace("num zeros: 7 |", "num zeros: 7 | bubble ratio: 0.25 |")
    lines = lines.replace("num zeros: 7 | bubble", "9 pairs | bubble", 1)
    (run,) = runs_of(lines.replace("num zeros: 7 | bubble ratio: 0.25 |", "81.5 pairs |", 1))
    said = "fields that are not understood: bubble ratio (2), # pairs (2)"
    assert said in run.provenance.remarks
    assert run.steps[-1].extra["bubble ratio"] == 0.25
    known = "load_balancing_loss: 1.0E+00 | z_loss: 2.5E-01 | mtp_1 loss: 9.5E+00 |"
    (run,) = runs_of(steps_of(1, 2).replace("num zeros: 7 |", known))
    assert run.steps[0].extra["mtp_1 loss"] == 9.5
    assert run.provenance.remarks == ()


def test_lines_of_two_formats_are_two_runs() -> None:
    first, second = runs_of(
        "# both\n" + TRAINER.format(1.5, 4.0, 0.1) + "\n" + SAMPLES["deepspeed"][0] + "\n"
        + TRAINER.format(1.25, 4.0, 0.2) + "\n"
    )  # fmt: skip
    assert [step.loss for step in first.steps] == [1.5, 1.25]
    assert (second.provenance.importer, second.steps[0].step) == ("deepspeed", 10)
    assert "lines of another format: they are a run of their own" in second.provenance.remarks


def test_arguments_with_other_values_behind_steps_are_those_of_another_run() -> None:
    text = "  world_size ...... {}\n  num_layers ...... 4\n" + steps_of(1)
    first, second = runs_of(text.format(8) + text.format(16))
    assert (first.workload.ranks, second.workload.ranks) == (8, 16)
    assert second.workload.layers == 4
    (resumed,) = runs_of(text.format(8) + text.format(8).replace(" 1/", " 2/"))
    assert [step.step for step in resumed.steps] == [1, 2]


WANDB = '"{x}","main - {m}","main - {m}__MIN","main - {m}__MAX","my - pr - {m}"\n' + (
    '"0","8.5","8.0","9.0","8.5"\n"10","","","","7.75"\n"20","7.5","7.5","7.5","7.25"\n'
)


@pytest.mark.parametrize(
    ("metric", "field", "factor"),
    [
        ("train/loss", "loss", 1), ("loss", "loss", 1), ("lm loss", "loss", 1),
        ("train/grad_norm", "grad_norm", 1), ("grad-norm", "grad_norm", 1),
        ("perf/time_per_step", "milliseconds", 1000), ("perf/step_time_ms", "milliseconds", 1),
        ("timing_s/step", "milliseconds", 1000), ("train/step_time (s)", "milliseconds", 1000),
        ("perf/throughput", "tokens_per_second_per_device", 1),
        ("perf/max_memory_allocated_gb", "device_peak_bytes", 2**30),
        ("throughput/device/tokens_per_sec", "tokens_per_second_per_device", 1),
    ],
)  # fmt: skip
def test_an_export_of_weights_and_biases_has_a_run_per_name(metric, field, factor) -> None:
    for axis in ("Step", "train/global_step", "_step"):
        main, pr = runs_of(WANDB.format(m=metric, x=axis))
        assert (main.provenance.label, pr.provenance.label) == ("main", "my - pr")
        told = [(step.step, getattr(step, field)) for step in main.steps]
        assert told == [(0, 8.5 * factor), (20, 7.5 * factor)]
        assert [getattr(step, field) for step in pr.steps] == [8.5 * factor, 7.75 * factor,
                                                               7.25 * factor]  # fmt: skip


RULES = ("|-|-|-|", "|:-|-:|:-:|", "| - | - | - |", "|---|---|---|", "|--:|:--|:-:|", "-|-|-",
         ":-:|-:|-", "| :---: | ---: | :--- |", "|-|-:|---------|", "- | - | -")  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a_table_of_markdown_may_have_any_rule(rule: str) -> None:
    edge = "|" if rule.startswith("|") else ""
    head = f"{edge} Run | Time per Global Step (s) | Peak memory (GiB) {edge}"
    rows = [f"{edge} {name} | {time} | 40.5 {edge}" for name, time in (("main", 1.5), ("pr", 1.25))]
    main, pr = runs_of("\n".join([head, rule, *rows]))
    assert (main.provenance.label, pr.provenance.label) == ("main", "pr")
    assert [run.steps[0].milliseconds for run in (main, pr)] == [1500.0, 1250.0]
    assert pr.steps[0].device_peak_bytes == 40.5 * 2**30


def test_a_table_may_have_a_column_per_run() -> None:
    main, pr = runs_of(
        "| | main | PR |\n|-|-|-|\n| Step time (ms) | 901.5 | 812 ms |\n| loss | 2.5 | 2.5 |\n"
        "| GPUs | 8 | 8 |\n"
    )
    assert (main.provenance.label, pr.provenance.label, pr.workload.ranks) == ("main", "PR", 8)
    assert [run.steps[0].milliseconds for run in (main, pr)] == [901.5, 812.0]


def test_a_time_with_its_spread_is_the_time() -> None:
    rows = "| main | 812 ± 3 ms |\n| pr | 0.75 +/- 0.01 s |\n| other | 800 |\n"
    main, pr = runs_of("| Run | Step time |\n|-|-|\n" + rows)
    assert [run.steps[0].milliseconds for run in (main, pr)] == [812.0, 750.0]


def test_a_column_steps_of_equal_numbers_is_a_length() -> None:
    rows = "| main | 50 | 2.5 |\n| pr | 50 | 2.25 |\n"
    main, pr = runs_of("| Run | Steps | loss |\n|-|-|-|\n" + rows)
    assert (main.workload.steps, main.steps[0].loss, pr.steps[0].loss) == (50, 2.5, 2.25)
    (alone,) = runs_of("| Run | Steps | loss |\n|-|-|-|\n| main | 50 | 2.5 |\n")
    assert alone.workload.steps == 50
    (run,) = runs_of("| Steps | loss |\n|-|-|\n| 10 | 2.5 |\n| 20 | 2.25 |\n")
    assert [step.step for step in run.steps] == [10, 20]


#: Tables of differences.
DIFFERENCES = (
    "| Test | `lm loss` (%) |\n|-|-:|\n| a | `+0.0002%` |\n",
    "| Test | lm loss (%) | step time (%) |\n|-|-|-|\n| a | 0.5 | 3 |\n",
    "| Test | Steps | loss [%] |\n|-|-|-|\n| a | 50 | 0.5 |\n| b | 50 | 0.25 |\n",
    "| Test | step time (ms) |\n|-|-|\n| a | +3.76% |\n| b | -14.5% |\n",
    "| Test | step time (ms) |\n|-|-|\n| a | +3.76 |\n",
    "| Test | loss |\n|-|-|\n| a | 0.1% |\n",
    "| Test | peak memory (GiB) |\n|-|-|\n| a | +1.5 |\n| b | -2% |\n",
    "| | a | b |\n|-|-|-|\n| step time (ms) | +1% | -2% |\n",
    "step,loss change\n1,+0.5%\n2,+0.25%\n",
    "step,loss\n1,0.5%\n2,+0.25%\n",
)


WITHOUT = (
    "",
    "\n\n",
    "# a heading\n\n- a bullet\n",
    "n1:7:8 [4] NCCL INFO ReduceScatter: 64 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}\n",
    "a ... b\n",
    "loss, step time, and memory\nare all equal, I think, here\n",
    '{"log_history": 7}',
    "| a | b |\n|-|-|\n| 1 | 2 |\n",
    "step:  3  loss: n/a\n",
    '{"log_history": [{"step": 1, "eval_loss": 2.5}]}',
    '"Step","main - reward","main - reward__MIN"\n"0","1","1"\n',
    "completed step: 9, total_weights: 3\n",
    "step:0 - val-core/acc/mean@1:0.508\n",
    "[batch=1/3]:\n\t Train time/batch: 0\n",
    "[Rank 0] (after 2 iterations) memory (MB) | fragments: 3\n",
    "iteration 3/ 5 | consumed samples: 3 |\n",
    "Training epoch 0, iteration 0/9 | consumed_samples: 32\n",
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "") for text in DIFFERENCES + WITHOUT),
        # All values were dropped.
        (
            "step:  1  loss:  1e99\nstep:  2  loss:  1e99\n",
            r"found only loss 1e\+99 \(line 1\), loss 1e\+99",
        ),
        (
            "step:  1  loss:  2.5\nstep:  2  loss:  2<5\n",
            "loss stands in several forms, of which 1",
        ),
        # Without a word of what stands there: what would be a run.
        ("| | |\n|-|-|\n| 5 | 6 |\n", "no training step that .* A table of steps can be imported"),
        ("step,loss\n1,0.5%\n", r"found only loss 0\.5% \(line 2\)"),
    ],
)
def test_a_run_without_any_value_is_none(text: str, says: str) -> None:
    with pytest.raises(NothingMeasuredError, match=rf"page holds no run: .*{says}") as caught:
        runs_of(text)
    assert caught.value.exit_code == 3


def test_what_has_no_number_of_ours_is_said_beside_runs() -> None:
    (run,) = runs_of("| Test | speed |\n|-|-|\n| a | 3 |\n\n" + steps_of(1, 2))
    said = "elsewhere in the text, without a number of ours: Test, speed"
    assert said in run.provenance.remarks


@pytest.mark.parametrize("gap", [" ", "\t", ","])
def test_columns_under_names_that_say_no_metric_are_no_losses(gap: str) -> None:
    rows = ("step baseline PR", "1 2.5 2.51", "2 2.4 2.41", "3 2.3 2.31")
    with pytest.raises(NothingMeasuredError, match="found only baseline, PR"):
        runs_of("\n".join(rows).replace(" ", gap))


def test_files_of_losses_are_read_with_and_without_a_head() -> None:
    (named,) = runs_of("# config: x\n\n# step loss grad_norm\n1 8.5 1.25\n2 7.75 1.5\n")
    (bare,) = runs_of("\n1 8.5\n2 7.75\n")
    assert [step.loss for step in named.steps] == [step.loss for step in bare.steps] == [8.5, 7.75]
    assert (named.steps[1].grad_norm, named.steps[1].lines, bare.steps[1].lines) == (
        1.5,
        (5,),
        (3,),
    )


MINE = r"""
name: mine
framework: mine
source: ["train.py: log_step"]
lines:
  - has: ["[step "]
    match: '\[step (?P<step>\d+)\] (?P<fields>.*)'
    split: ',\s*'
fields:
  ce: loss
  wall: milliseconds from s
  peak: [device_peak_bytes from GiB, as peak per cent]
kept: [epoch]
unknown: "mine: {name}"
"""


def test_a_row_of_ones_own_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    line = "[step 3] ce: 2.5, wall: 0.75, peak: 12.5/80%, epoch: 1, heat: 61\n"
    (run,) = runs_of(line, str(path))
    (step,) = run.steps
    assert (run.workload.framework, step.step, step.loss, step.milliseconds) == (
        "mine", 3, 2.5, 750.0,
    )  # fmt: skip
    assert step.device_peak_bytes == 12.5 * 2**30
    assert step.extra == {"peak per cent": 80.0, "epoch": 1.0, "mine: heat": 61.0}
    assert run.provenance.remarks == ("fields that are not understood: heat (1)",)
    with pytest.raises(NothingMeasuredError):
        runs_of(steps_of(1), str(path))


def test_thousands_that_a_blank_parts_are_no_small_number() -> None:
    line = "step: 1  loss: 8.1  grad_norm: 1.2  tps: 1 234  tflops: 10.1"
    (step,) = runs_of(line)[0].steps
    assert (step.tokens_per_second_per_device, step.teraflops_per_device) == (None, 10.1)


@pytest.mark.parametrize(
    "line",
    [
        '{"log_history":[{"step":1,"loss":1.5},{"step":3,"loss":1.1}',
        '{"step":1,"loss":1.5}{"step":2,"loss":1.3}',
        '{"a":{"step":1,"loss":9.0},"step":2,"loss":1.5}',
    ],
)
def test_numbers_of_several_objects_in_a_line_never_mix(line: str) -> None:
    with pytest.raises(NothingMeasuredError):
        runs_of(line)
    assert [step.loss for step in runs_of(f'{line}\n{{"step": 4, "loss": 1.0}}')[0].steps] == [1.0]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("ce: loss", "ce: losses", r"fields.ce: .*expected .*loss, .*found 'losses'"),
        (
            "from s",
            "from miles",
            r"fields.wall: .*expected a unit \(us, .*found 'milliseconds from mil",
        ),
        (r"\[step (?P", r"[step (?P", "lines.0.match: .*valid regular expression"),
        ("split:", "splits:", "lines.0.splits: Extra inputs are not permitted"),
        ("name: mine", "nome: mine", "name: Field required"),
        (
            "kept: [epoch]",
            "facts: {epoch: epochs}",
            "facts.epoch: .*expected framework, .*'epochs'",
        ),
        (MINE, "[1, 2", "expected a file of YAML"),
        (MINE, "- 1", "the file: "),
        (MINE, "", "the file: "),
        ("kept: [epoch]", "step_from: 2", "step_from: "),
        ("kept: [epoch]", "kept: ['(epoch']", "kept.0: .*valid regular expression"),
        ("kept: [epoch]", "facts: {'(epoch': model}", "facts.*valid regular expression"),
        ("kept: [epoch]", "step: '(epoch'", "step: .*valid regular expression"),
        (
            "kept: [epoch]",
            "patterns: {heat: []}",
            r"patterns.heat: .*expected .*loss, .*found \[\]",
        ),
        ("ce: loss", "ce:", "fields.ce: .*expected .*loss, .*found None"),
        ("ce: loss", "ce: 3", "fields.ce: .*expected .*loss, .*found 3"),
        (
            "split: ',",
            "field: '.+'\n    split: ',",
            "lines.0: .*the groups name and value, found no n",
        ),
        ("split: ',", "kind: argument\n    split: ',", "lines.0: .*name and value, found no name"),
        ("name: mine", r'name: "\ud800"', "expected a file of YAML"),
    ],
)
def test_a_row_that_is_none_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE.replace(old, new))
    with pytest.raises(UsageError, match=rf"--format .*mine\.yaml: {says}"):
        runs_of("[step 3] ce: 2.5\n", str(path))
    with pytest.raises(UsageError, match=r"--format: expected .* or FILE.yaml"):
        runs_of("x", "no-such-row")


#: The row is a regular expression of the user's; those that are shipped stay quick on long lines.
LONG: dict[str, Callable[[int], str]] = {
    "spaces": lambda n: "iteration 1/ 5 |" + " " * n,
    "bars": lambda n: "iteration 1/ 5 |" + "|" * n,
    "brackets": lambda n: "step: 1  loss: " + "[1" * n,
    "names": lambda n: "step 1: loss " + "a " * n,
    "commas": lambda n: "loss: 1, " + "1," * n,
    "cells": lambda n: "|" * n + "\n" + "|-" * n + "|",
    "epochs": lambda n: "Epoch 1: " + "1/1 [, " * n + "reduced_train_loss=",
    "quotes": lambda n: "{'loss': " + "'a': " * n + "}",
}


@pytest.mark.parametrize("kind", LONG)
def test_a_long_line_is_read_or_passed_over(kind: str) -> None:
    for count in (300, 8_000):
        try:
            runs_of(LONG[kind](count))
        except NothingMeasuredError:
            continue


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("step 2: loss -nan, time 5ms", ("nan", 5.0)),
        ("step 2: loss tensor(2.0) | time 5ms", ("2.0", 5.0)),
        # A field without a value leaves the others of their line.
        ("step 2: loss -, time 5ms", ("None", 5.0)),
        # An evaluation is one field of a step of training, before or behind its loss.
        ("step 2: loss 2.0, time 5ms, val 3.0", ("2.0", 5.0)),
        ("step 2: loss 2.0, eval acc: 3.0, time 5ms", ("2.0", 5.0)),
        ("step 2: val 3.0, loss 2.0, time 5ms", ("2.0", 5.0)),
        ("step 2: train loss 2.0, val loss 3.0, time 5ms", ("2.0", 5.0)),
        # Lines of an evaluation.
        ("step 2: val loss 3.0, lr 1e-3, time 5ms", None),
        ("step 2: train loss 2.0, val loss 3.0", None),
        ("step 2: loss 3.0, time 5ms, split: val", None),
        ("Validation step 2: loss 3.0, time 5ms", None),
        ("eval epoch 3 step 2: loss 3.0, time 5ms", None),
    ],
)
def test_a_line_of_pairs_is_a_step_unless_it_is_an_evaluation(line, wanted) -> None:
    (run,) = runs_of(f"step 1: loss 2.5, time 6ms, 12.5% done\nsaved, time 3ms\n{line}\n")
    assert [(str(step.loss), step.milliseconds) for step in run.steps] == [
        ("2.5", 6.0),
        *([wanted] if wanted else []),
    ]


def test_a_run_whose_first_line_has_an_evaluation_ends_where_steps_begin_again() -> None:
    text = "step 1: loss 2.5, time 6ms, val 3.0\nstep 2: loss 2.4, time 6ms\n"
    runs = runs_of(text + "step 1: loss 2.1, time 5ms\n")
    assert [len(run.steps) for run in runs] == [2, 1]


def test_a_line_of_pairs_of_which_no_number_is_understood_is_named() -> None:
    text = "step 1: loss 2.5, lr 1.0\nstep 2: loss 2.1 (2.3), time 5 (6)\n"
    (run,) = runs_of(text)
    assert "loss 2.1 (2.3) (line 2)" in str(run.provenance.remarks)
