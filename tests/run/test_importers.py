"""Logs of other frameworks: what they say is kept, what they do not say stays absent."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.errors import BenchError, NothingMeasuredError, UsageError
from bench.importers.table import read_log

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


def read(tmp_path: Path, text: str | bytes, form: str | None = None, **facts: str):
    log = tmp_path / "train.log"
    log.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_log(log, form, facts)


def test_a_log_of_megatron_tells_its_run(tmp_path: Path) -> None:
    workload, provenance, steps = read(tmp_path, MEGATRON)
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
    assert provenance.remarks == ("1 iterations were skipped",)


def test_parameters_of_one_part_of_a_model_are_not_those_of_the_model(tmp_path: Path) -> None:
    cut = MEGATRON.replace(
        "tensor_model_parallel_size ...................... 1",
        "tensor_model_parallel_size ...................... 2",
    )
    assert read(tmp_path, cut)[0].parameters is None


def test_a_log_without_arguments_leaves_them_absent(tmp_path: Path) -> None:
    workload, provenance, _ = read(tmp_path, ITERATION.format(7, "1.0", "2.0", 0))
    assert (workload.engine, workload.compute_dtype, workload.ranks) == (None, None, None)
    assert "engine" in provenance.absent
    assert "peak memory" in provenance.absent


def test_what_the_caller_knows_stands_beside_what_the_log_says(tmp_path: Path) -> None:
    workload = read(tmp_path, MEGATRON, device="H100", ranks="64")[0]
    assert (workload.device, workload.ranks, workload.layers) == ("H100", 64, 32)


@pytest.mark.parametrize(
    ("facts", "says"),
    [({"rank": "1"}, "--set rank: expected one of"), ({"ranks": "x"}, "--set ranks: .* found 'x'")],
)
def test_a_fact_that_is_none_is_refused(tmp_path: Path, facts: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read(tmp_path, MEGATRON, **facts)


def test_of_a_resumed_run_the_last_lines_count_and_it_is_said(tmp_path: Path) -> None:
    again = MEGATRON + ITERATION.format(2, "700.0", "1.05E+01", 0)
    _, provenance, steps = read(tmp_path, again)
    assert steps[1].milliseconds == 700.0
    assert any("1 steps stand more than once" in remark for remark in provenance.remarks)


def test_lines_that_are_means_over_several_steps_are_said_to_be(tmp_path: Path) -> None:
    text = "".join(ITERATION.format(step, "1.0", "2.0", 0) for step in (10, 20, 30))
    assert any("a mean over several steps" in said for said in read(tmp_path, text)[1].remarks)


def test_a_loss_that_is_not_finite_stays_so(tmp_path: Path) -> None:
    (step,) = read(tmp_path, ITERATION.format(1, "1.0", "NAN", 0))[2]
    assert step.loss is not None
    assert math.isnan(step.loss)


def test_a_log_of_torchtitan_tells_its_steps_without_its_colours(tmp_path: Path) -> None:
    workload, provenance, (step,) = read(tmp_path, TITAN)
    assert (workload.framework, provenance.importer) == ("torchtitan", "torchtitan")
    assert (step.step, step.loss, step.grad_norm) == (1, 12.2721, 3.21)
    assert (step.tokens_per_second_per_device, step.teraflops_per_device) == (1524.0, 80.1)
    assert step.device_reserved_peak_bytes == 47.5 * 2**30
    assert (step.device_peak_bytes, step.milliseconds) == (None, None)


def test_a_table_of_steps_is_read_by_the_names_of_its_columns(tmp_path: Path) -> None:
    workload, _, steps = read(tmp_path, "step,loss,milliseconds\n1,2.5,\n2,2.25,10\n", engine="x")
    assert (workload.framework, workload.engine) == ("unknown", "x")
    assert [(step.loss, step.milliseconds) for step in steps] == [(2.5, None), (2.25, 10.0)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("step,los\n1,2\n", "column 'los': expected one of step, milliseconds"),
        ("step,loss\n1,two\n", "line 2, column loss: expected a number, found 'two'"),
        ("step,loss\n1.5,2\n", "line 2, column step: expected a whole number, found '1.5'"),
    ],
)
def test_a_table_that_cannot_be_understood_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read(tmp_path, text)


def test_a_log_without_steps_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(NothingMeasuredError, match="no training step that megatron prints"):
        read(tmp_path, TITAN, form="megatron")


@given(st.integers(0, len(MEGATRON)), st.integers(0, 200), st.binary(max_size=20))
def test_a_damaged_log_is_read_or_refused(tmp_path_factory, at, length, junk) -> None:
    whole = (MEGATRON + TITAN + "step,loss\n1,2\n").encode()
    with contextlib.suppress(BenchError):
        read(tmp_path_factory.mktemp("log"), whole[:at] + junk + whole[at + length :])
