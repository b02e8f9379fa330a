"""Every engine trains the hybrid family to the losses of the single process."""

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

TRAIN = TrainSpec(steps=4, global_batch=4, micro_batch=1, seq_len=40, lr=4e-3, warmup_steps=2)
FP32, FP64 = DtypeSpec(), DtypeSpec(compute="fp64", main_params="fp64")
BF16 = DtypeSpec(compute="bf16", main_grads="fp32", grad_comm="bf16")


def cell(
    name: str,
    strategy: str | None = None,
    dtypes: DtypeSpec = FP32,
    expert_parallel: int = 1,
    **model,
) -> ResolvedRun:
    return resolve_anywhere(
        RunSpec(
            model=ModelSpec(preset="hybrid-tiny", pattern="ME*-", experts=4, hidden=96, **model),
            data=DataSpec(kind="markov"),
            engine=EngineSpec(name=name, strategy=strategy, expert_parallel=expert_parallel),
            dtypes=dtypes,
            train=TRAIN,
            launch=LaunchSpec(ranks=1 if name == "single" else 2),
        )
    )


FP32_CELLS = {
    "ddp": cell("ddp"),
    "fsdp2": cell("fsdp2", "optim_grads_params"),
    "mfsdp-no_shard": cell("mfsdp", "no_shard"),
    "mfsdp-optim": cell("mfsdp", "optim"),
    "mfsdp-optim_grads": cell("mfsdp", "optim_grads"),
    "mfsdp": cell("mfsdp", "optim_grads_params"),
    "mfsdp-recompute": cell("mfsdp", "optim_grads_params", recompute="full"),
}
FP64_CELLS = {f"{name}-fp64": cell(name, dtypes=FP64) for name in ("fsdp2", "mfsdp")} | {
    "mfsdp-experts-fp64": cell("mfsdp", dtypes=FP64, expert_parallel=2)
}
BF16_CELLS = {f"{name}-bf16": cell(name, dtypes=BF16) for name in ("ddp", "fsdp2", "mfsdp")}
#: Strategies and recomputation, which daily the other family varies.
NIGHTLY_CELLS = {
    *("mfsdp-no_shard", "mfsdp-optim", "mfsdp-optim_grads", "mfsdp-recompute"),
    *("ddp-bf16", "fsdp2-bf16"),
}
TWO_RANK_CELLS = FP32_CELLS | FP64_CELLS | BF16_CELLS
SINGLE_CELLS = {"single": cell("single"), "single-fp64": cell("single", dtypes=FP64)}

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cells(run_cells, wanted_cells, tmp_path_factory) -> Mapping:
    root = tmp_path_factory.mktemp("hybrid")
    return run_cells(root, SINGLE_CELLS) | run_cells(root, wanted_cells(TWO_RANK_CELLS))


@pytest.mark.parametrize("name", FP32_CELLS)
def test_fp32_losses_of_a_hybrid_agree_with_the_single_process_to_1e_5(cells, name):
    assert cells[name].losses == pytest.approx(cells["single"].losses, rel=1e-5)
    assert cells[name].norms == pytest.approx(cells["single"].norms, rel=1e-4)


@pytest.mark.parametrize("name", FP64_CELLS)
def test_fp64_losses_of_a_hybrid_agree_with_the_single_process_to_1e_12(cells, name):
    assert cells[name].losses == pytest.approx(cells["single-fp64"].losses, rel=1e-12)
    assert cells[name].norms == pytest.approx(cells["single-fp64"].norms, rel=1e-11)


@pytest.mark.parametrize("name", BF16_CELLS)
def test_bf16_losses_of_a_hybrid_stay_within_half_a_percent_of_fp32(cells, name):
    assert cells[name].losses == pytest.approx(cells["single"].losses, rel=5e-3)
    assert cells[name].losses != pytest.approx(cells["single"].losses, rel=1e-6)


@pytest.mark.parametrize("name", FP32_CELLS)
def test_a_hybrid_learns(cells, name):
    losses = cells[name].losses
    assert losses[0] == pytest.approx(math.log(256), rel=0.02)
    assert losses[-1] < losses[0] - 0.1
