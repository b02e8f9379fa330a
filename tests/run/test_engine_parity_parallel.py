"""Beside tensor and expert parallelism, engines train to the losses of the single process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bench.resolve.resolution import resolve_anywhere
from bench.resolve.state_bytes import state_bytes_by_category
from bench.spec import (
    DtypeSpec,
    EngineSpec,
    LaunchSpec,
    ModelSpec,
    ResolvedRun,
    RunSpec,
    TrainSpec,
)

FP64 = DtypeSpec(compute="fp64", main_params="fp64")
BF16 = DtypeSpec(compute="bf16", main_grads="fp32", grad_comm="bf16")
LLAMA = ModelSpec(layers=2)
TIED = ModelSpec(layers=2, tie_embeddings=True)
HYBRID = ModelSpec(preset="hybrid-tiny", pattern="ME*-", experts=4, hidden=96)
TRAIN = TrainSpec(steps=3, global_batch=8, micro_batch=1, seq_len=32, lr=4e-3, warmup_steps=2)
HSDP = {"outer_size": 2}
HFSDP = {"outer_size": 2, "outer_strategy": "optim"}


def cell(
    name: str, model: ModelSpec = LLAMA, dtypes: DtypeSpec = FP64, ranks: int = 4, **engine: Any
) -> ResolvedRun:
    return resolve_anywhere(
        RunSpec(
            model=model,
            engine=EngineSpec(name=name, **engine),
            dtypes=dtypes,
            train=TRAIN,
            launch=LaunchSpec(ranks=1 if name == "single" else ranks),
        )
    )


LLAMA_CELLS = {
    "fsdp2-tp": cell("fsdp2", tensor_parallel=2),
    "fsdp2-flat": cell("fsdp2"),
    "fsdp2-reshard_to_2": cell("fsdp2", reshard_after_forward=2),
    "mfsdp-tp": cell("mfsdp", tensor_parallel=2),
    "mfsdp-tp-no_shard": cell("mfsdp", strategy="no_shard", tensor_parallel=2),
    "mfsdp-tp-optim": cell("mfsdp", strategy="optim", tensor_parallel=2),
    "mfsdp-per_token": cell("mfsdp", per_token_loss=True, nan_check=True),
    "mfsdp-tp-per_token": cell("mfsdp", strategy="optim", tensor_parallel=2, per_token_loss=True),
    "mfsdp-tp-hsdp": cell("mfsdp", tensor_parallel=2, **HSDP),
    "mfsdp-tp-hfsdp": cell("mfsdp", tensor_parallel=2, **HFSDP),
}
HYBRID_CELLS = {
    "mfsdp-ep": cell("mfsdp", HYBRID, expert_parallel=2),
    "mfsdp-ep4": cell("mfsdp", HYBRID, strategy="no_shard", expert_parallel=4),
    "mfsdp-ep-hfsdp": cell("mfsdp", HYBRID, expert_parallel=2, **HFSDP),
}
OTHER_CELLS = {
    "fsdp2-tp-tied": cell("fsdp2", TIED, tensor_parallel=2),
    "mfsdp-tp-tied": cell("mfsdp", TIED, tensor_parallel=2),
    "mfsdp-bf16": cell("mfsdp", dtypes=BF16),
    "fsdp2-tp-bf16": cell("fsdp2", dtypes=BF16, tensor_parallel=2),
    "mfsdp-tp-bf16": cell("mfsdp", dtypes=BF16, tensor_parallel=2),
    "mfsdp-ep-bf16": cell("mfsdp", HYBRID, BF16, expert_parallel=2),
    "mfsdp-mxfp8": cell("mfsdp", dtypes=BF16, recipe="mxfp8"),
    "mfsdp-tp-mxfp8": cell("mfsdp", dtypes=BF16, recipe="mxfp8", tensor_parallel=2),
}
FOUR_RANK_CELLS = LLAMA_CELLS | HYBRID_CELLS | OTHER_CELLS
SINGLE_CELLS = {
    "single": cell("single"),
    "single-tied": cell("single", TIED),
    "single-hybrid": cell("single", HYBRID),
}

pytestmark = [pytest.mark.processes, pytest.mark.nightly]


@pytest.fixture(scope="module")
def cells(run_cells, tmp_path_factory) -> Mapping:
    root = tmp_path_factory.mktemp("parallel")
    return run_cells(root, SINGLE_CELLS) | run_cells(root, FOUR_RANK_CELLS)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        *((name, "single") for name in LLAMA_CELLS),
        *((name, "single-hybrid") for name in HYBRID_CELLS),
        ("fsdp2-tp-tied", "single-tied"),
        ("mfsdp-tp-tied", "single-tied"),
    ],
)
def test_fp64_losses_and_norms_agree_with_the_single_process_to_1e_12(cells, name, reference):
    assert cells[name].losses == pytest.approx(cells[reference].losses, rel=1e-12)
    assert cells[name].norms == pytest.approx(cells[reference].norms, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("fsdp2-tp-bf16", "single"),
        ("mfsdp-tp-bf16", "single"),
        ("mfsdp-ep-bf16", "single-hybrid"),
        ("mfsdp-tp-mxfp8", "mfsdp-mxfp8"),
    ],
)
def test_low_precision_losses_stay_within_0_2_percent(cells, name, reference):
    assert cells[name].losses == pytest.approx(cells[reference].losses, rel=2e-3)


def test_codes_of_mxfp8_beside_tensor_parallelism_are_not_bf16(cells):
    assert cells["mfsdp-tp-mxfp8"].losses != cells["mfsdp-tp-bf16"].losses
    gathered = cells["mfsdp-tp-mxfp8"].document("runtime.json")["gathered_bytes"]
    assert gathered["uint8"] > 0.9 * sum(gathered.values())


def test_layers_kept_in_parts_are_gathered_again_from_fewer_ranks_for_less(cells):
    kept, whole = (
        cells[name].document("runtime.json")["gathered_bytes"]["float64"]
        for name in ("fsdp2-reshard_to_2", "fsdp2-flat")
    )
    assert 0.75 * whole < kept < whole  # 3/4 of a layer and 1/2 of it, in the place of 3/4 twice


def test_ranks_of_a_tensor_parallel_group_train_on_the_same_data(cells):
    losses = [cells["fsdp2-tp"].samples(rank)[0].loss for rank in range(4)]
    assert losses[0] == losses[1] != losses[2] == losses[3]


@pytest.mark.parametrize("name", FOUR_RANK_CELLS)
def test_the_plan_knows_the_bytes_of_gradients_and_optimizer_state(cells, name):
    planned = state_bytes_by_category(FOUR_RANK_CELLS[name])
    found = cells[name].document("memory.json")["by_category_bytes"]
    for category in ("gradients", "optimizer_state"):
        assert found[category] == planned[category]


def test_a_part_over_half_the_ranks_is_as_much_as_the_whole_over_all(cells):
    whole, cut = (
        cells[name].document("memory.json")["by_category_bytes"]
        for name in ("mfsdp-bf16", "mfsdp-tp-bf16")
    )
    assert cut["optimizer_state"] == pytest.approx(whole["optimizer_state"], rel=0.02)
