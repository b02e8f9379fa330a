"""Every engine trains the same models on the same data to the same losses.

What an engine does within a step is checked by the cases of `validate`. Here it is a run: its data,
rates and losses, the bytes that it sends, and the memory that its plan foretells.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import pytest

from bench.resolve.resolution import resolve_anywhere
from bench.resolve.state_bytes import state_bytes_by_category
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

STEPS = 5
LAYERS = 2
TRAIN = TrainSpec(steps=STEPS, global_batch=8, micro_batch=2, seq_len=32, lr=4e-3, warmup_steps=2)
FP32 = DtypeSpec()
FP64 = DtypeSpec(compute="fp64", main_params="fp64")
BF16 = DtypeSpec(compute="bf16", main_grads="fp32", grad_comm="bf16")
LLAMA = ModelSpec(preset="debug", layers=LAYERS)
TIED = LLAMA.model_copy(update={"tie_embeddings": True})
HYBRID = ModelSpec(preset="hybrid-tiny", pattern="ME*-", experts=4, hidden=96)
ZERO3 = "optim_grads_params"
OUTER: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "hsdp": {"outer_size": 2},
    "hfsdp": {"outer_size": 2, "outer_strategy": "optim"},
}


def cell(
    engine: str,
    strategy: str | None = None,
    dtypes: DtypeSpec = FP32,
    model: ModelSpec = LLAMA,
    train: dict[str, Any] | None = None,
    ranks: int = 2,
    **own: Any,
) -> ResolvedRun:
    """On each rank two microbatches per step."""
    return resolve_anywhere(
        RunSpec(
            model=model,
            data=DataSpec(kind="markov"),
            engine=EngineSpec(name=engine, strategy=strategy, **own),
            dtypes=dtypes,
            train=TRAIN.model_copy(
                update={"micro_batch": 4 // ranks if ranks > 1 else 2}
            ).model_copy(update=train or {}),
            launch=LaunchSpec(ranks=1 if engine == "single" else ranks),
        )
    )


def with_recompute(kind: str) -> ModelSpec:
    return LLAMA.model_copy(update={"recompute": kind})


DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
SAVING = {"checkpoint_every": 2}
DEEPSPEED_CELLS = {
    f"deepspeed-{strategy}": cell("deepspeed", strategy)
    for strategy in ("optim", "optim_grads", ZERO3)
    if DEEPSPEED
}
FP32_CELLS = {
    "ddp": cell("ddp", train=SAVING),
    "ddp_zero": cell("ddp_zero"),
    "fsdp1-no_shard": cell("fsdp1", "no_shard"),
    "fsdp1-optim_grads": cell("fsdp1", "optim_grads"),
    "fsdp1-optim_grads_params": cell("fsdp1", ZERO3),
    "fsdp2-optim_grads": cell("fsdp2", "optim_grads"),
    "fsdp2-optim_grads_params": cell("fsdp2", ZERO3, train=SAVING),
    "simple_fsdp-optim_grads": cell("simple_fsdp", "optim_grads"),
    "simple_fsdp-optim_grads_params": cell("simple_fsdp", ZERO3),
    **DEEPSPEED_CELLS,
    "mfsdp-no_shard": cell("mfsdp", "no_shard"),
    "mfsdp-optim": cell("mfsdp", "optim"),
    "mfsdp-optim_grads": cell("mfsdp", "optim_grads"),
    "mfsdp-optim_grads_params": cell("mfsdp", ZERO3, train=SAVING),
}
VARIANTS = {
    "mfsdp-per_token": cell("mfsdp", per_token_loss=True, nan_check=True),
    "fsdp1-recompute": cell("fsdp1", model=with_recompute("full")),
    "fsdp2-recompute": cell("fsdp2", model=with_recompute("full")),
    "simple_fsdp-recompute": cell("simple_fsdp", model=with_recompute("full")),
    "simple_fsdp-compiled": cell("simple_fsdp", compile_backend="aot_eager"),
    "simple_fsdp-compiled-optim_grads": cell(
        "simple_fsdp", "optim_grads", compile_backend="inductor"
    ),
    "mfsdp-recompute": cell("mfsdp", model=with_recompute("full")),
    "mfsdp-recompute_selective": cell("mfsdp", model=with_recompute("selective")),
}
TIED_CELLS = {f"{name}-tied": cell(name, model=TIED) for name in ("fsdp2", "simple_fsdp", "mfsdp")}
BF16_CELLS = {
    f"{engine}-bf16": cell(engine, strategy, BF16)
    for engine, strategy in (
        ("ddp", None),
        ("ddp_zero", None),
        ("fsdp1", ZERO3),
        ("fsdp2", ZERO3),
        ("simple_fsdp", None),
        ("mfsdp", ZERO3),
    )
} | {
    "mfsdp-no_shard-bf16": cell("mfsdp", "no_shard", BF16),
    **{f"{name}-bf16": cell("deepspeed", name[10:], BF16) for name in DEEPSPEED_CELLS},
}
#: Of `single-fp64`. Parts of tensor parallelism are one data-parallel rank on two ranks.
FP64_CELLS = {
    "ddp_zero-fp64": cell("ddp_zero", dtypes=FP64),
    "simple_fsdp-fp64": cell("simple_fsdp", dtypes=FP64),
    "fsdp2-tp": cell("fsdp2", dtypes=FP64, tensor_parallel=2),
    "mfsdp-tp": cell("mfsdp", dtypes=FP64, tensor_parallel=2),
    **{
        f"mfsdp-tp-{axes}": cell("mfsdp", dtypes=FP64, ranks=4, tensor_parallel=2, **outer)
        for axes, outer in OUTER.items()
    },
}
#: Of `single-hybrid`.
HYBRID_CELLS = {
    "fsdp2-hybrid": cell("fsdp2", dtypes=FP64, model=HYBRID),
    "mfsdp-hybrid": cell("mfsdp", dtypes=FP64, model=HYBRID),
    "mfsdp-experts": cell("mfsdp", dtypes=FP64, model=HYBRID, expert_parallel=2),
    "mfsdp-experts-hfsdp": cell(
        "mfsdp", dtypes=FP64, model=HYBRID, ranks=4, expert_parallel=2, **OUTER["hfsdp"]
    ),
}
EIGHT_BIT_CELLS = {
    f"{name}-adamw_8bit": cell(name, train={"optimizer": "adamw_8bit"})
    for name in ("fsdp2", "mfsdp")
    if importlib.util.find_spec("torchao") is not None
}
SINGLE_CELLS = {
    "single": cell("single", train=SAVING),
    "single-fp64": cell("single", dtypes=FP64),
    "single-tied": cell("single", model=TIED),
    "single-hybrid": cell("single", dtypes=FP64, model=HYBRID),
}
#: Variants of engines that are torch's own, and what other daily cells vary as well.
NIGHTLY_CELLS = {
    *("fsdp1-recompute", "fsdp2-recompute", "mfsdp-recompute_selective"),
    *(name for name, run in FP64_CELLS.items() if run.launch.ranks == 4),
    *("fsdp1-no_shard", "fsdp1-optim_grads", "fsdp2-optim_grads", "fsdp1-bf16", "fsdp2-tied"),
    *("ddp_zero-bf16", "ddp_zero-fp64", "fsdp2-hybrid", "mfsdp-experts-hfsdp"),
    *("simple_fsdp-optim_grads", "simple_fsdp-recompute", "simple_fsdp-compiled"),
    *("simple_fsdp-compiled-optim_grads", "simple_fsdp-bf16", "simple_fsdp-fp64"),
    *("simple_fsdp-tied", "deepspeed-optim", "deepspeed-optim_grads"),
    *(name for name in BF16_CELLS if name.startswith("deepspeed")),
}
TWO_RANK_CELLS = FP32_CELLS | VARIANTS | BF16_CELLS | TIED_CELLS
CELLS = SINGLE_CELLS | TWO_RANK_CELLS | FP64_CELLS | HYBRID_CELLS | EIGHT_BIT_CELLS

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cells(run_cells, wanted_cells, tmp_path_factory) -> Mapping:
    found = {}
    for ranks in (1, 2, 4):
        wanted = {n: c for n, c in wanted_cells(CELLS).items() if c.launch.ranks == ranks}
        if wanted:
            found |= run_cells(tmp_path_factory.mktemp("cells"), wanted)
    return found


@pytest.mark.parametrize("name", [*FP32_CELLS, *VARIANTS])
def test_fp32_losses_and_norms_agree_with_the_single_process_to_1e_5(cells, name):
    assert cells[name].losses == pytest.approx(cells["single"].losses, rel=1e-5)
    assert cells[name].norms == pytest.approx(cells["single"].norms, rel=1e-5)


@pytest.mark.parametrize("name", [*FP64_CELLS, *HYBRID_CELLS])
def test_fp64_losses_and_norms_agree_with_the_single_process_to_1e_12(cells, name):
    single = cells["single-hybrid" if name in HYBRID_CELLS else "single-fp64"]
    assert cells[name].losses == pytest.approx(single.losses, rel=1e-12)
    assert cells[name].norms == pytest.approx(single.norms, rel=1e-11)


def test_moments_of_codes_train_as_under_fully_shard(cells):
    pytest.importorskip("torchao")
    found, expected = (cells[f"{name}-adamw_8bit"] for name in ("mfsdp", "fsdp2"))
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)
    assert found.losses == pytest.approx(cells["single"].losses, rel=1e-2)
    planned = state_bytes_by_category(EIGHT_BIT_CELLS["mfsdp-adamw_8bit"])["optimizer_state"]
    plain = ledger(cells["mfsdp-optim"])["optimizer_state"]
    assert ledger(found)["optimizer_state"] == planned < plain / 2


@pytest.mark.parametrize("name", TIED_CELLS)
def test_a_tied_embedding_trains_like_the_single_process_does(cells, name):
    assert cells[name].losses == pytest.approx(cells["single-tied"].losses, rel=1e-5)
    assert cells[name].norms == pytest.approx(cells["single-tied"].norms, rel=1e-5)
    assert cells[name].losses != pytest.approx(cells["single"].losses, rel=1e-5)


@pytest.mark.parametrize("name", BF16_CELLS)
def test_bf16_losses_stay_within_0_2_percent_of_fp32_but_are_not_fp32(cells, name):
    assert cells[name].losses == pytest.approx(cells["single"].losses, rel=2e-3)
    assert cells[name].losses != pytest.approx(cells["single"].losses, rel=1e-6)


@pytest.mark.parametrize("name", ["single", "single-hybrid"])
def test_the_model_learns(cells, name):
    losses = cells[name].losses
    assert losses[0] == pytest.approx(math.log(256), rel=0.02)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("name", [*TWO_RANK_CELLS, *FP64_CELLS])
def test_ranks_see_different_data_and_the_same_gradient_norm(cells, name):
    first, second = cells[name].samples(0), cells[name].samples(1)
    shares_data = "-tp" in name
    assert all((a.loss == b.loss) == shares_data for a, b in zip(first, second, strict=True))
    assert [s.grad_norm for s in first] == [s.grad_norm for s in second]


def test_single_consumes_the_whole_global_batch_and_a_rank_its_share(cells):
    assert {sample.tokens for sample in cells["single"].samples()} == {8 * 32}
    assert {sample.tokens for sample in cells["ddp"].samples()} == {8 * 32 // 2}


# What a rank sends per step, for 2 ranks and 2 microbatches: (n-1)/n = 1/2 of a full buffer for
# every gather and reduction, twice that for an all-reduce. In fsdp2 every dim 0 divides by 2; the
# core pads its flat buffers, by 0.3 % here. With sharded parameters a layer is gathered for its
# forward and for its backward; the root once per microbatch (fsdp2) or once per step (core).
LAYER = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 512 + 2 * 128
NORMS = (2 * LAYERS + 1) * 128
ROOT = 2 * 256 * 128 + 128
PARAMETERS = LAYERS * LAYER + ROOT
ALL_REDUCE = 2 * PARAMETERS / 2
REDUCE_SCATTER = GATHER = PARAMETERS / 2
SHARDED_GATHERS = 2 * 2 * LAYERS * LAYER / 2
ELEMENTS_SENT_PER_STEP = {
    "single": 0,
    "ddp": ALL_REDUCE,
    "ddp_zero": ALL_REDUCE + GATHER,
    "fsdp1-no_shard": ALL_REDUCE,
    "fsdp1-optim_grads": 2 * REDUCE_SCATTER + 2 * GATHER,
    "fsdp1-optim_grads_params": 2 * REDUCE_SCATTER + SHARDED_GATHERS + 2 * ROOT / 2,
    "fsdp2-optim_grads": 2 * REDUCE_SCATTER + GATHER,
    "fsdp2-optim_grads_params": 2 * REDUCE_SCATTER + SHARDED_GATHERS + 2 * ROOT / 2,
    # The norms read their weights twice, and each read is a gather.
    "simple_fsdp-optim_grads": 2 * REDUCE_SCATTER + 2 * (GATHER + NORMS / 2),
    # Every weight once per pass; the embedding's backward pass reads no weight.
    "simple_fsdp-optim_grads_params": 2 * REDUCE_SCATTER
    + 2 * (2 * GATHER + NORMS / 2 - 256 * 128 / 2),
    "mfsdp-no_shard": ALL_REDUCE,
    "mfsdp-optim": REDUCE_SCATTER + GATHER,
    "mfsdp-optim_grads": 2 * REDUCE_SCATTER + GATHER,
    "mfsdp-optim_grads_params": 2 * REDUCE_SCATTER + SHARDED_GATHERS + ROOT / 2,
}


@pytest.mark.parametrize("name", ELEMENTS_SENT_PER_STEP)
def test_bytes_sent_follow_from_the_schedule(cells, name):
    (sent,) = {sample.wire_bytes for sample in cells[name].samples()[1:]}
    padding = 0.005 if name.startswith("mfsdp") else 0
    assert sent == pytest.approx(4 * ELEMENTS_SENT_PER_STEP[name], rel=padding)


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("ddp-bf16", "ddp"),
        ("fsdp1-bf16", "fsdp1-optim_grads_params"),
        ("fsdp2-bf16", "fsdp2-optim_grads_params"),
        ("mfsdp-bf16", "mfsdp-optim_grads_params"),
        ("mfsdp-no_shard-bf16", "mfsdp-no_shard"),
    ],
)
def test_bf16_compute_and_communication_halve_the_bytes_sent(cells, name, whole):
    assert cells[name].samples()[-1].wire_bytes * 2 == cells[whole].samples()[-1].wire_bytes


def ledger(finished) -> dict[str, int]:
    return finished.document("memory.json")["by_category_bytes"]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, 1) for name in ("single", "ddp", "fsdp1-no_shard", "mfsdp-no_shard")),
        *((name, 2) for name in ("fsdp1-bf16", "fsdp2-bf16", "mfsdp-bf16")),
    ],
)
def test_a_replica_holds_all_that_is_persistent_and_a_shard_its_part(cells, name, ranks):
    found = ledger(cells[name])
    for category, size in {"main_weights": 4, "gradients": 4, "optimizer_state": 8}.items():
        assert found[category] == pytest.approx(size * PARAMETERS / ranks, rel=0.005)
    if ranks == 1:
        assert found.get("compute_weights", 0) == pytest.approx(0, abs=0.005 * 4 * PARAMETERS)


@pytest.mark.parametrize(
    "name",
    [
        "single",
        *(name for name in FP32_CELLS if name not in DEEPSPEED_CELLS),
        *("ddp-bf16", "fsdp2-bf16", "mfsdp-bf16"),
        *(name for name in (*FP64_CELLS, *HYBRID_CELLS) if "-tp" in name or "-experts" in name),
    ],
)
def test_the_plan_knows_the_bytes_of_gradients_and_optimizer_state(cells, name):
    planned = state_bytes_by_category(CELLS[name])
    found = ledger(cells[name])
    for category in ("gradients", "optimizer_state"):
        if name.startswith("fsdp1"):  # without padding and counters
            assert planned[category] <= found[category] <= 1.01 * planned[category]
        else:
            assert found[category] == planned[category]
    weights = ("main_weights", "compute_weights")
    assert sum(found.get(c, 0) for c in weights) >= sum(planned.get(c, 0) for c in weights)


def test_fsdp2_gathers_the_root_and_two_layers_at_most_and_reduces_a_layer(cells):
    found = ledger(cells["fsdp2-bf16"])
    assert found["compute_weights"] == 2 * (ROOT + 2 * LAYER)
    # The largest unit is a layer: gathered in bf16, reduced in bf16 from a full input to a half.
    assert found["communication_buffers"] == 2 * LAYER + 2 * LAYER + 2 * LAYER // 2


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("single", "bench/engines/single.py"),
        ("ddp", "torch/nn/parallel/distributed.py"),
        ("ddp_zero", "torch/distributed/optim/zero_redundancy_optimizer.py"),
        ("fsdp1-bf16", "torch/distributed/fsdp/fully_sharded_data_parallel.py"),
        ("fsdp2-bf16", "torch/distributed/fsdp/_fully_shard/_fully_shard.py"),
        ("mfsdp-bf16", "mfsdp_core/__init__.py"),
    ],
)
def test_the_run_names_the_file_of_the_implementation_that_ran(cells, name, file):
    assert cells[name].document("runtime.json")["engine_code_path"].endswith(file)


def test_what_meters_cost_is_part_of_the_record(cells):
    meters = [
        cells[name].document("runtime.json")["meters"] for name in TWO_RANK_CELLS if name in cells
    ]
    names = {"cpu", "wire", "memory", "device", "samples"}
    assert all(set(each["seconds"]) == names for each in meters)
    assert all(each["steps"] == STEPS for each in meters)
    assert all(each["fraction_of_step_time"] > 0 for each in meters)


@pytest.mark.parametrize(
    "name", [name for name, run in CELLS.items() if run.train.checkpoint_every]
)
def test_a_run_that_saves_after_every_second_step_keeps_the_account(cells, name):
    account = cells[name].document("checkpoints.json")
    assert account["every_steps"] == 2
    assert [save["step"] for save in account["saves"]] == [2, 4]
    # AdamW in FP32: a weight and two moments of four bytes per parameter, once over all ranks.
    state_bytes = 12 * CELLS[name].shape.parameters
    for save in account["saves"]:
        assert save["milliseconds"] > 0
        assert state_bytes <= save["bytes"] <= 1.2 * state_bytes
    assert not (cells[name].folder / "checkpoint").exists()
