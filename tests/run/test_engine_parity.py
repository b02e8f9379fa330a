"""Every engine trains the same model on the same data to the same losses."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from bench.resolve.resolution import resolve_anywhere
from bench.spec import (
    DataSpec,
    DtypeSpec,
    EngineSpec,
    LaunchSpec,
    ModelSpec,
    ResolvedRun,
    RunSpec,
    TrainSpec,
)

STEPS = 10
WARMUP = 4
TRAIN = TrainSpec(
    steps=STEPS, global_batch=8, micro_batch=2, seq_len=32, lr=1e-3, warmup_steps=WARMUP
)
FP32 = DtypeSpec()
BF16 = DtypeSpec(compute="bf16", main_grads="fp32", grad_comm="bf16")


def cell(engine: str, strategy: str | None = None, dtypes: DtypeSpec = FP32) -> ResolvedRun:
    return resolve_anywhere(
        RunSpec(
            model=ModelSpec(preset="debug"),
            data=DataSpec(kind="markov"),
            engine=EngineSpec(name=engine, strategy=strategy),
            dtypes=dtypes,
            train=TRAIN,
            launch=LaunchSpec(ranks=1 if engine == "single" else 2),
        )
    )


TWO_RANK_CELLS = {
    "ddp": cell("ddp"),
    "ddp-bf16": cell("ddp", dtypes=BF16),
    "fsdp2-optim_grads": cell("fsdp2", "optim_grads"),
    "fsdp2-optim_grads_params": cell("fsdp2", "optim_grads_params"),
    "fsdp2-bf16": cell("fsdp2", "optim_grads_params", BF16),
}
SHARDED_FP32 = ("ddp", "fsdp2-optim_grads", "fsdp2-optim_grads_params")

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cells(run_cells, tmp_path_factory) -> Mapping:
    root = tmp_path_factory.mktemp("cells")
    return run_cells(root, {"single": cell("single")}) | run_cells(root, TWO_RANK_CELLS)


@pytest.mark.parametrize("name", SHARDED_FP32)
def test_fp32_losses_agree_with_the_single_process_to_1e_5(cells, name):
    assert cells[name].losses == pytest.approx(cells["single"].losses, rel=1e-5)


@pytest.mark.parametrize("name", SHARDED_FP32)
def test_fp32_gradient_norms_agree_with_the_single_process_to_1e_5(cells, name):
    reference = [sample.grad_norm for sample in cells["single"].samples()]
    assert [s.grad_norm for s in cells[name].samples()] == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize("name", TWO_RANK_CELLS)
def test_the_model_learns(cells, name):
    losses = cells[name].losses
    assert losses[0] == pytest.approx(math.log(256), rel=0.02)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("name", ["ddp-bf16", "fsdp2-bf16"])
def test_bf16_losses_stay_within_one_percent_of_fp32(cells, name):
    assert cells[name].losses == pytest.approx(cells["single"].losses, rel=1e-2)
    assert cells[name].losses != cells["single"].losses


@pytest.mark.parametrize("name", TWO_RANK_CELLS)
def test_ranks_see_different_data_and_the_same_gradient_norm(cells, name):
    first, second = cells[name].samples(0), cells[name].samples(1)
    assert all(a.loss != b.loss for a, b in zip(first, second, strict=True))
    assert [s.grad_norm for s in first] == [s.grad_norm for s in second]


def test_single_consumes_the_whole_global_batch_and_a_rank_its_share(cells):
    assert {sample.tokens for sample in cells["single"].samples()} == {8 * 32}
    assert {sample.tokens for sample in cells["ddp"].samples()} == {8 * 32 // 2}


def test_the_learning_rate_warms_up_linearly(cells):
    rates = [sample.learning_rate for sample in cells["single"].samples()]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3] + [1e-3] * (STEPS - 3))


# What a rank sends per step, for 2 ranks and 2 microbatches: (n-1)/n = 1/2 of a full buffer for
# every gather and reduction, twice that for an all-reduce. Every dim 0 divides by 2: no padding.
LAYER = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 512 + 2 * 128
ROOT = 2 * 256 * 128 + 128
PARAMETERS = 4 * LAYER + ROOT
WIRE_BYTES_PER_STEP = {
    "ddp": 4 * PARAMETERS,
    "ddp-bf16": 2 * PARAMETERS,
    "fsdp2-optim_grads": (4 + 2 * 4) * PARAMETERS // 2,
    "fsdp2-optim_grads_params": 2 * (4 * (4 + 4 + 4) * LAYER + (4 + 4) * ROOT) // 2,
    "fsdp2-bf16": 2 * (4 * (2 + 2 + 2) * LAYER + (2 + 2) * ROOT) // 2,
}


@pytest.mark.parametrize("name", TWO_RANK_CELLS)
def test_bytes_sent_follow_from_the_schedule(cells, name):
    sent = {sample.wire_bytes for sample in cells[name].samples()[1:]}
    assert sent == {WIRE_BYTES_PER_STEP[name]}


def test_a_single_process_sends_nothing(cells):
    assert {sample.wire_bytes for sample in cells["single"].samples()} == {0}


@pytest.mark.parametrize("name", ["single", "ddp"])
def test_a_replica_holds_all_weights_gradients_and_two_moments(cells, name):
    ledger = cells[name].document("memory.json")["by_category_bytes"]
    assert ledger["main_weights"] == ledger["gradients"] == 4 * PARAMETERS
    # AdamW also keeps one FP32 step count for each parameter tensor.
    assert ledger["optimizer_state"] == 2 * 4 * PARAMETERS + 4 * (4 * 9 + 3)


def test_fsdp2_holds_half_of_everything_persistent_on_two_ranks(cells):
    ledger = cells["fsdp2-bf16"].document("memory.json")["by_category_bytes"]
    assert ledger["main_weights"] == ledger["gradients"] == 4 * PARAMETERS // 2
    assert ledger["compute_weights"] == 2 * (ROOT + 2 * LAYER)
    # The largest unit is a layer: gathered in bf16, reduced in bf16 from a full input to a half.
    assert ledger["communication_buffers"] == 2 * LAYER + 2 * LAYER + 2 * LAYER // 2


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("single", "bench/engines/single.py"),
        ("ddp", "torch/nn/parallel/distributed.py"),
        ("fsdp2-bf16", "torch/distributed/fsdp/_fully_shard/_fully_shard.py"),
    ],
)
def test_the_run_names_the_file_of_the_implementation_that_ran(cells, name, file):
    assert cells[name].document("runtime.json")["engine_code_path"].endswith(file)


@pytest.mark.parametrize("name", ["single", *TWO_RANK_CELLS])
def test_meters_cost_less_than_one_percent_of_the_steps(cells, name):
    meters = cells[name].document("runtime.json")["meters"]
    assert set(meters["seconds"]) == {"wire", "memory", "samples"}
    assert meters["steps"] == STEPS
    assert 0 < meters["fraction_of_step_time"] < 0.01
