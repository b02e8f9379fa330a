"""Logs of other frameworks: what they say is kept, what they do not say stays absent."""

from __future__ import annotations

import json

import pytest

from bench.errors import NothingMeasuredError, UsageError
from bench.importers.table import read_text
from bench.workload import ImportedRun

# As Megatron-LM prints them; the numbers are made up.
ITERATION = (
    " [2026-01-29 09:54:18] iteration {:8d}/     500 | consumed samples:        12800 |"
    " elapsed time per iteration (ms): {} | throughput per GPU (TFLOP/s/GPU): 617.5 |"
    " learning rate: 4.915198E-07 | global batch size:   128 | lm loss: {} | loss scale: 1.0 |"
    " grad norm: 5.414 | num zeros: 0 | number of skipped iterations:   {} |"
    " number of nan iterations:   0 |\n"
)
MEMORY = (
    "[Rank {}] (after 2 iterations) memory (MB) | allocated: 10.00 | max allocated: {} |"
    " reserved: 30.00 | max reserved: 40.00\n"
)
ARGUMENTS = """\
0: ------------------------ arguments ------------------------
0:   bf16 ............................................ True
0:   data_parallel_sharding_strategy ................. optim_grads_params
0:   hidden_size ..................................... 4096
0:   megatron_fsdp_grad_comm_dtype ................... torch.bfloat16
0:   num_layers ...................................... 32
0:   optimizer ....................................... adam
0:   pipeline_model_parallel_size .................... 1
0:   seq_length ...................................... 8192
0:   tensor_model_parallel_size ...................... 1
0:   use_megatron_fsdp ............................... True
0:   use_nccl_ub ..................................... False
0:   world_size ...................................... 8
0: -------------------- end of arguments ---------------------
 > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 8030261248
"""
MEGATRON = (
    ARGUMENTS
    + MEMORY.format(0, "20.50")
    + MEMORY.format(1, "21.00")
    + ITERATION.format(1, "9000.0", "1.20E+01", 0)
    + ITERATION.format(2, "802.5", "1.10E+01", 1)
)
TITAN = (
    "[rank0]:[titan] 2026-01-01 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2721  "
    "\x1b[38;2;180;60;0mgrad_norm:  3.2100  \x1b[36mmemory: 47.50GiB(59.62%)  "
    "\x1b[34mtps: 1,524  \x1b[36mtflops: 80.10  \x1b[35mmfu: 8.09%\x1b[39m\n"
    "[rank0]:[titan] - validate step:  1  loss:  9.0000  memory: 50.00GiB(60.00%)  tps: 1\n"
)


def runs_of(text: str | bytes, form: str | None = None, **facts: str) -> list[ImportedRun]:
    return read_text("train.log", [text.encode() if isinstance(text, str) else text], form, facts)


def read(text: str | bytes, form: str | None = None, **facts: str):
    (run,) = runs_of(text, form, **facts)
    return run.workload, run.provenance, run.steps


def test_a_log_of_megatron_tells_its_run() -> None:
    workload, provenance, steps = read(MEGATRON)
    assert (workload.framework, workload.engine) == ("megatron-lm", "megatron-fsdp")
    assert (workload.strategy, workload.grad_comm_dtype) == ("optim_grads_params", "bf16")
    assert (workload.compute_dtype, workload.parameters) == ("bf16", 8030261248)
    assert workload.tokens_per_step == 128 * 8192
    assert workload.settings["use_nccl_ub"] is False
    assert [step.loss for step in steps] == [12.0, 11.0]
    assert [step.milliseconds for step in steps] == [9000.0, 802.5]
    assert (steps[1].grad_norm, steps[1].teraflops_per_device) == (5.414, 617.5)
    # The largest of all ranks, in units of 1024 twice.
    assert steps[1].device_peak_bytes == 21 * 2**20
    assert steps[0].device_peak_bytes is None
    assert (provenance.importer, provenance.source) == ("megatron", "train.log")
    assert provenance.absent == ("model", "device")
    assert provenance.remarks == ("1 iterations were skipped (step 2)",)


def test_every_field_of_a_line_is_kept_with_its_lines() -> None:
    line = ITERATION.format(2, "1.0", "2.0", 1).replace(" |\n", " | params norm: 7.5 |\n")
    (step,) = read(MEMORY.format(0, "20.00") + line)[2]
    assert step.extra == {
        "timestamp": "2026-01-29 09:54:18",
        "consumed samples": 12800.0,
        "loss scale": 1.0,
        "num zeros": 0.0,
        "params norm": 7.5,
        "number of skipped iterations": 1.0,
        "number of nan iterations": 0.0,
    }
    assert (step.device_allocated_bytes, step.device_peak_bytes) == (10 * 2**20, 20 * 2**20)
    assert (step.device_reserved_bytes, step.device_reserved_peak_bytes) == (30 << 20, 40 << 20)
    assert step.lines == (1, 2)


@pytest.mark.parametrize("after", [True, False])
def test_memory_belongs_to_the_line_that_follows_or_precedes_it(after: bool) -> None:
    parts = [MEMORY.format(0, "20.00"), ITERATION.format(100, "1.0", "2.0", 0)]
    (step,) = read("".join(parts[:: -1 if after else 1]))[2]
    assert (step.step, step.device_peak_bytes) == (100, 20 << 20)
    assert step.extra["memory after iterations"] == 2


def test_parameters_of_one_part_of_a_model_are_not_those_of_the_model() -> None:
    cut = MEGATRON.replace(
        "tensor_model_parallel_size ...................... 1",
        "tensor_model_parallel_size ...................... 2",
    )
    assert read(cut)[0].parameters is None


def test_a_log_without_arguments_leaves_them_absent() -> None:
    workload, provenance, _ = read(ITERATION.format(7, "1.0", "2.0", 0))
    assert (workload.engine, workload.compute_dtype, workload.ranks) == (None, None, None)
    assert "engine" in provenance.absent
    assert "peak memory" in provenance.absent


def test_what_the_caller_knows_stands_beside_what_the_log_says() -> None:
    workload = read(MEGATRON, device="H100", ranks="64")[0]
    assert (workload.device, workload.ranks, workload.layers) == ("H100", 64, 32)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"rank": "1"}, "--set rank: expected one of"),
        ({"ranks": "x"}, "--set ranks: .* found 'x'"),
        ({"ranks": "-1"}, "--set ranks: .* found '-1'"),
        ({"seq_len": "9" * 300}, "--set seq_len: "),
    ],
)
def test_a_fact_that_is_none_is_refused(facts: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read(MEGATRON, **facts)


def test_of_a_resumed_run_the_last_lines_count_and_it_is_said() -> None:
    again = MEGATRON + ITERATION.format(2, "700.0", "1.05E+01", 0)
    _, provenance, steps = read(again)
    assert steps[1].milliseconds == 700.0
    assert any("1 steps stand more than once" in remark for remark in provenance.remarks)


def test_a_repeated_line_without_a_loss_does_not_keep_the_loss_of_the_first() -> None:
    bad = ITERATION.format(2, "700.0", "1.0", 0).replace("lm loss: 1.0 |", "")
    bad = bad.replace("nan iterations:   0", "nan iterations:   1")
    _, provenance, steps = read(MEGATRON + bad)
    assert (str(steps[1].loss), steps[1].device_peak_bytes) == ("nan", 21 << 20)
    assert "1 iterations gave not-a-number (step 2)" in provenance.remarks


def test_lines_that_are_means_over_several_steps_are_said_to_be() -> None:
    text = "".join(ITERATION.format(step, "1.0", "2.0", 0) for step in (10, 20, 30))
    assert any("a mean over several" in said for said in read(text)[1].remarks)


@pytest.mark.parametrize(
    ("milliseconds", "loss", "says"),
    [
        ("-5.0", "2.0", "milliseconds -5 (line 1)"),
        ("inf", "2.0", "milliseconds inf (line 1)"),
        ("1e308", "2.0", "milliseconds 1e+308 (line 1)"),
        ("0.0", "2.0", "milliseconds 0 (line 1)"),
        ("1.0", "-1e308", "loss -1e+308 (line 1)"),
        # Commas stand between thousands; a decimal comma would make ten times the time of it.
        ("3263,1", "2.0", "milliseconds 3263,1 (line 1)"),
        ("1.0", "5,473558E+00", "loss 5,473558E+00 (line 1)"),
        ("1.101,5", "2.0", "milliseconds 1.101,5 (line 1)"),
    ],
)
def test_a_value_that_cannot_be_is_dropped_with_its_line(milliseconds, loss, says) -> None:
    _, provenance, (step,) = read(ITERATION.format(1, milliseconds, loss, 0))
    assert None in (step.milliseconds, step.loss)
    assert f"1 values that cannot be were dropped: {says}" in provenance.remarks


def test_memory_with_a_decimal_comma_is_dropped_with_its_line() -> None:
    _, provenance, (step,) = read(MEMORY.format(0, "18516,73") + ITERATION.format(2, "1", "2", 0))
    assert (step.device_peak_bytes, step.device_allocated_bytes) == (None, 10 << 20)
    (said,) = provenance.remarks
    assert said == "1 values that cannot be were dropped: device_peak_bytes 18516,73 (line 1)"


def test_a_number_with_two_points_is_dropped_in_a_line_of_a_pipeline() -> None:
    text = "steps: 10 loss: 1.2.3 iter time (s): 1,500.5 samples/sec: 21.3"
    _, provenance, (step,) = read(text, "deepspeed")
    assert (step.loss, step.milliseconds) == (None, 1500500.0)
    assert "1 values that cannot be were dropped: loss 1.2.3 (line 1)" in provenance.remarks


def test_the_field_at_which_a_line_was_cut_off_is_dropped() -> None:
    line = ITERATION.format(2, "1.0", "9.473558E-01", 0)
    _, provenance, (_, step) = read(
        ITERATION.format(1, "1.0", "1.0", 0) + line[: line.index("9.47") + 8]
    )
    assert (step.milliseconds, step.loss) == (1.0, None)
    assert "loss 9.473558 without a | behind it, cut off" in provenance.remarks[0]


def test_two_lines_of_iterations_without_a_break_do_not_mix() -> None:
    first, second = (ITERATION.format(step, f"{step}.0", "2.0", 0) for step in (1, 2))
    step = read(first.rstrip("\n") + second)[2][0]
    assert (step.step, step.milliseconds) == (1, 1.0)


def test_of_many_values_that_cannot_be_the_first_are_shown_and_all_are_counted() -> None:
    text = "".join(ITERATION.format(step, "-1.0", "2.0", 0) for step in range(1, 9))
    (said,) = read(text)[1].remarks
    assert said.startswith("8 values that cannot be were dropped: milliseconds -1 (line 1), ")
    assert said.endswith("(line 5) and 3 more")


def test_a_log_of_torchtitan_tells_its_steps_without_its_colours() -> None:
    workload, provenance, (step,) = read(TITAN)
    assert (workload.framework, provenance.importer) == ("torchtitan", "torchtitan")
    assert (step.step, step.loss, step.grad_norm) == (1, 12.2721, 3.21)
    assert (step.tokens_per_second_per_device, step.teraflops_per_device) == (1524.0, 80.1)
    assert step.device_reserved_peak_bytes == 47.5 * 2**30
    assert (step.device_peak_bytes, step.milliseconds) == (None, None)
    assert step.extra == {"memory %": 59.62, "mfu": 8.09}


def test_older_torchtitan_says_words_for_tokens_and_no_gradient_norm() -> None:
    line = "step: 10  loss:  7.1234  memory: 10.00GiB(10.00%)  wps: 2,048  mfu: N/A\n"
    (step,) = read(line)[2]
    assert (step.tokens_per_second_per_device, step.grad_norm) == (2048.0, None)


MARKDOWN = """\
Some text above.

| Step | Step time (s) | **Loss** | Peak memory (GiB) | my own |
|-----:|--------------:|---------:|------------------:|--------|
| 1 | 1.5 | 2.5 | 10 | a |
| 2 | 1,000.25 | ~2.25 | 10.5[^1] | b |
| 3 | - | n/a | 11 | |

Text below.
"""


@pytest.mark.parametrize("form", ["markdown", "tsv", "csv"])
def test_tables_of_all_three_forms_say_the_same(form: str) -> None:
    text = MARKDOWN
    if form != "markdown":
        rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
        cells = [[cell.strip() for cell in row] for row in rows]
        quoted = [[f'"{cell}"' if "," in cell else cell for cell in row] for row in cells]
        text = "\n".join(("\t" if form == "tsv" else ",").join(row) for row in quoted)
    _, provenance, steps = read(text)
    assert provenance.importer == "table"
    assert [step.milliseconds for step in steps] == [1500.0, 1000250.0, None]
    assert [step.loss for step in steps] == [2.5, 2.25, None]
    assert steps[1].device_peak_bytes == 10.5 * 2**30
    assert [step.extra for step in steps] == [{"my own": "a"}, {"my own": "b"}, {}]


def test_rows_without_a_step_are_runs_of_their_own() -> None:
    first, second = runs_of(
        "| Model | #-GPUs | GBS | Sequence Length | Precision | Tokens / sec / GPU | Model TFLOP /"
        " sec / GPU |\n|---|---|---|---|---|---|---|\n"
        "| LLAMA3_8B | 8 | 128 | 8192 | FP8-CS (FP8-MX) | 31508 (29789) | 1622 (1533) |\n"
        "| LLAMA3_8B | 8 | 4096 | FP8-MX | 3 | 1 |\n"
        "| LLAMA3_8B | 8 | 128 | 8192 | BF16 | 10000 | 500 |\n"
    )
    assert (first.provenance.label, second.provenance.label) == (
        "LLAMA3_8B FP8-CS (FP8-MX)", "LLAMA3_8B BF16",
    )  # fmt: skip
    assert (first.workload.model, first.workload.ranks) == ("LLAMA3_8B", 8)
    assert first.workload.tokens_per_step == 128 * 8192
    (step,) = first.steps
    assert (step.tokens_per_second_per_device, step.teraflops_per_device) == (31508, 1622)
    assert step.extra["Tokens / sec / GPU in brackets"] == 29789
    # A row that lacks a cell would move every number into another column.
    assert any("row of cells 6 (line 4)" in said for said in first.provenance.remarks)


def test_rows_of_several_runs_are_told_apart_by_their_words_where_steps_repeat() -> None:
    rows = "date,run,step,loss\nMon,base,1,2.5\nTue,base,2,2.4\nWed,head,1,2.5\nThu,head,2,2.6\n"
    runs = {run.provenance.label: [step.loss for step in run.steps] for run in runs_of(rows)}
    assert runs == {"base": [2.5, 2.4], "head": [2.5, 2.6]}
    (alone,) = runs_of("\n".join(rows.splitlines()[:3]))
    assert [step.loss for step in alone.steps] == [2.5, 2.4]


SERIES = {
    # A status varies along one run; the last line of a step counts.
    "step,status,loss\n1,ok,2.5\n2,ok,2.4\n2,retry,2.3\n3,ok,2.2\n": {"": [2.5, 2.3, 2.2]},
    "status,run,step,loss\nok,a,1,2.5\nwarn,a,2,2.4\nok,b,1,2.6\nok,b,2,2.3\n": {
        "a": [2.5, 2.4], "b": [2.6, 2.3],
    },
    "e,kind,step,loss\nx,p,1,1\nx,p,2,2\nx,q,1,3\nx,q,2,4\ny,p,1,5\ny,p,2,6\n": {
        "x p": [1, 2], "x q": [3, 4], "y p": [5, 6],
    },
    "run,step,loss\na,1,1\na,2,2\na,3,3\nb,2,4\nb,3,5\nb,4,6\n": {"a": [1, 2, 3], "b": [4, 5, 6]},
    "seed,step,loss\n7,1,1\n7,2,2\n8,1,3\n8,2,4\n": {"": [3, 4]},  # the first has this label, too
    "loss,grad_norm\n2.5,1\n2.4,2\n": {"": [2.5, 2.4]},
    "epoch,loss,time\n1,2.5,9\n2,2.4,9\n": {"": [2.5, 2.4]},
    "layers,loss\n2,2.5\n4,2.4\n": {"": [2.4]},
}  # fmt: skip


@pytest.mark.parametrize("text", SERIES)
def test_words_that_vary_along_a_run_make_none(text: str) -> None:
    runs = runs_of(text)
    assert len(runs) == len(SERIES[text]) + text.startswith(("seed", "layers"))
    found = {run.provenance.label: [step.loss for step in run.steps] for run in runs}
    assert found == SERIES[text]


@pytest.mark.parametrize(
    "header",
    ["step,main loss,PR loss,loss (%)", "step,loss (base),loss (new),delta loss",
     "step,loss_fsdp2,loss_ours,loss diff"],
)  # fmt: skip
def test_columns_of_one_metric_for_two_sides_are_two_runs(header: str) -> None:
    base, head = runs_of(f"{header}\n1,2.5,2.5,0\n2,2.4,2.41,0.4\n")
    assert [step.loss for step in base.steps] == [2.5, 2.4]
    assert [step.loss for step in head.steps] == [2.5, 2.41]


def test_of_two_sides_the_metric_may_be_in_brackets() -> None:
    runs = runs_of(
        "#-GPUs,FSDP2 (tok/s/GPU),Megatron-FSDP (tok/s/GPU)\n8,9000,9900\n16,8000,8800\n"
    )
    told = [
        (r.workload.ranks, r.provenance.side, r.steps[0].tokens_per_second_per_device) for r in runs
    ]
    assert told == [
        (8, "FSDP2", 9000), (8, "Megatron-FSDP", 9900),
        (16, "FSDP2", 8000), (16, "Megatron-FSDP", 8800),
    ]  # fmt: skip


def test_a_column_of_another_quantity_is_no_run_and_one_without_a_side_is_of_none() -> None:
    runs = runs_of(
        "| step | base loss | PR loss | loss scale | loss gap | grad norm |\n"
        "|---|---|---|---|---|---|\n"
        "| 0 | 2.5 | 2.6 | 65536 | 0.1 | 1.5 |\n"
    )
    assert [(run.steps[0].loss, run.steps[0].grad_norm) for run in runs] == [
        (2.5, None),
        (2.6, None),
    ]
    said = " ".join(runs[0].provenance.remarks)
    assert "loss scale (1)" in said
    assert "grad norm (1)" in said


def test_columns_of_two_statistics_are_one_run() -> None:
    (run,) = runs_of("step,train loss,val loss,max peak memory (GB)\n1,2.5,9.5,3\n")
    assert [step.loss for step in run.steps] == [2.5]


def test_steps_next_to_words_are_lengths_and_units_need_no_brackets() -> None:
    first, second = runs_of(
        "| Cell | steps | step ms | alloc GB |\n|---|---|---|---|\n"
        "| FSDP ckpt | 8 | 3917 | 43.86 |\n| ZeRO-2 | **16** | **4416** | — |\n"
        "| eager | 8 | OOM | - |\n"
    )
    assert [run.provenance.label for run in (first, second)] == ["FSDP ckpt", "ZeRO-2"]
    assert (first.workload.steps, second.workload.steps) == (8, 16)
    assert (first.steps[0].milliseconds, first.steps[0].device_allocated_bytes) == (3917, 43.86e9)
    assert second.steps[0].milliseconds == 4416


def test_a_column_that_calls_every_row_passed_leaves_none_out() -> None:
    base, head = runs_of(
        "| Run | Status | Max allocated | Max reserved |\n|---|---|---|---|\n"
        "| main | Passed | 39,812.1 MB | 42,110.0 MB |\n| PR | Passed | 38,912 MB | 41,100 MB |\n"
    )
    assert [run.steps[0].device_peak_bytes for run in (base, head)] == [39812100000, 38912000000]


def test_settings_may_be_columns_and_a_long_heading_hides_no_name() -> None:
    first, second = runs_of(
        "#### A model of 7B with a context length of 4k and full fine-tuning, 8xA100 40GB GPUs\n"
        "Settings | FSDP | Stage-2 | Stage-3\n-- | -- | -- | --\n"
        "Speed | 2.93 seconds | - | 2.86 seconds\nMemory Usage | 23.8GB per GPU | OOM | 38 GB/GPU\n"
    )
    assert (first.id, second.id) == ("fsdp", "stage-3")
    of_both = [
        (step.milliseconds, step.device_memory_bytes) for step in (*first.steps, *second.steps)
    ]
    assert of_both == [(2930.0, 23800000000), (2860.0, 38000000000)]


def test_a_column_of_batches_says_not_of_how_many_devices() -> None:
    first, second = runs_of("run,bs,step ms\na,8,3917\nb,12,5831\n")
    assert (first.workload.batch, second.workload.batch) == (8, 12)
    assert (first.workload.global_batch, first.workload.micro_batch) == (None, None)


def test_values_on_lines_of_their_own_are_no_wrapped_line() -> None:
    with pytest.raises(NothingMeasuredError, match="holds no run"):
        read("step: 100\nloss: 3.2031\nLR: 0.0003\ncurrent step time: 2.05\n")


def test_a_unit_that_a_column_does_not_name_is_not_guessed() -> None:
    (step,) = read("step,step time,loss\n1,250,2.5\n")[2]
    assert (step.milliseconds, step.extra) == (None, {"step time": 250.0})


def test_columns_that_are_not_understood_are_kept_up_to_a_bound() -> None:
    names = [f"c{at}" for at in range(300)]
    text = ",".join(["step", "loss", *names]) + "\n1,2.5" + ",7" * 300 + "\n"
    _, provenance, (step,) = read(text)
    assert len(step.extra) == 64
    assert step.extra["c63"] == 7.0
    assert any("236 columns beyond 64" in said for said in provenance.remarks)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("step,loss,lr\n1,2,1\n2,two,1\n", "loss two (line 3)"),
        ("step,loss\n1,2\n1.5,2\n", "step 1.5 (line 3)"),
    ],
)
def test_a_cell_that_cannot_be_understood_is_dropped_with_its_line(text: str, says: str) -> None:
    assert any(says in said for said in read(text)[1].remarks)


BRIDGE = """\
Step Time : 20.29s GPU utilization: 512.5MODEL_TFLOP/s/GPU
[2025-12-19 10:49:15] iteration        1/       1 | consumed samples:          128 |\
 elapsed time per iteration (ms): 20289.1 | learning rate: 3.000000E-05 | global batch size:   128\
 | lm loss: 1.258695E+01 | loss scale: 1.0 | grad norm: 10.275 | max attention logit: 3.500 |\
 number of skipped iterations:   0 | number of nan iterations:   0 |Number of parameters: 6.98
[Rank 0] (after 1 iterations) memory (GB) | mem-allocated-gigabytes: 51.072 |\
 mem-reserved-gigabytes: 216.89 | mem-max-allocated-gigabytes: 194.41 |\
 mem-max-reserved-gigabytes: 216.89 | mem-alloc-retires: 0
"""


def test_bridge_prints_gigabytes_of_1e9_and_a_step_time_above_the_line() -> None:
    workload, _, (step,) = read(BRIDGE)
    assert workload.framework == "megatron-bridge"
    assert (step.milliseconds, step.teraflops_per_device) == (20289.1, 512.5)
    assert (step.device_peak_bytes, step.device_allocated_bytes) == (194410000000, 51072000000)
    assert (step.extra["mem-alloc-retires"], step.extra["max attention logit"]) == (0.0, 3.5)
    assert step.lines == (1, 2, 3)


def test_step_times_of_bridge_alone_are_numbered_as_they_stand() -> None:
    text = "".join(f"Step Time : {s}s GPU utilization: 4.0TFLOP/s/GPU\n" for s in (3, 2))
    _, provenance, steps = read(text)
    assert [(step.step, step.milliseconds) for step in steps] == [(1, 3000.0), (2, 2000.0)]
    assert any("numbered as they stand" in said for said in provenance.remarks)


def test_nemo_counts_from_nought_and_over_epochs() -> None:
    text = (
        "Training epoch 1, iteration 2/9 | lr: 0.0006 | global_batch_size: 32 | global_step: 12 |"
        " reduced_train_loss: 9.21 | train_step_timing in s: 0.03146\n"
        "Training epoch 0, iteration 4/9 | lr: 0.0006 | reduced_train_loss: 9.5\n"
    )
    workload, _, steps = read(text)
    assert (workload.framework, workload.global_batch) == ("nemo", 32)
    assert [step.step for step in steps] == [5, 13]
    assert steps[1].milliseconds == pytest.approx(31.46)


STATE = {
    "global_step": 100,
    "max_steps": 100,
    "log_history": [
        {"epoch": 0.3, "grad_norm": 1.5, "learning_rate": 7.9e-06, "loss": 1.387, "step": 50},
        {"epoch": 0.3, "eval_loss": 9.9, "eval_runtime": 92.0, "step": 50},
        {"epoch": 0.6, "grad_norm": float("nan"), "loss": 0.0, "step": 100},
        {"train_loss": 1.2, "train_runtime": 50.0, "step": 100},
    ],
}


def test_a_state_of_the_trainer_keeps_losses_apart_from_evaluations() -> None:
    workload, _, steps = read(json.dumps(STATE, indent=1))
    assert (workload.framework, workload.steps) == ("transformers", 100)
    assert [(step.step, step.loss) for step in steps] == [(50, 1.387), (100, 0.0)]
    assert steps[0].extra["eval_loss"] == 9.9
    assert str(steps[1].grad_norm) == "nan"


def test_what_the_trainer_sums_up_at_its_end_is_kept_with_the_last_step() -> None:
    printed = [{"loss": 2.5, "epoch": 0.1}, {"loss": 2.4, "epoch": 0.2}]
    end = {"train_runtime": 50.0, "train_loss": 2.45, "epoch": 1.0}
    _, provenance, steps = read("".join(f"{one}\n" for one in [*printed, end]))
    assert [step.loss for step in steps] == [2.5, 2.4]
    assert steps[0].extra == {"epoch": 0.1}
    assert steps[1].extra == {"epoch": 0.2, "train_runtime": 50.0, "train_loss": 2.45}
    assert not any("left out" in text for text in provenance.remarks)


def test_a_log_without_steps_says_what_was_looked_for() -> None:
    with pytest.raises(NothingMeasuredError, match="no training step that megatron prints"):
        read(TITAN, form="megatron")
