"""Every engine trains the same models on the same data to the same losses.

What an engine does within a step is checked by the cases of `validate`. Here it is a run: its data,
rates and losses, the bytes that it sends, and the memory that its plan foretells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from engine_cells import (
    BF16_CELLS,
    CELLS,
    FP32_CELLS,
    FP64_CELLS,
    HYBRID_CELLS,
    LAYERS,
    NIGHTLY_CELLS,  # noqa: F401 - read by conftest.py
    PARALLEL_CELLS,
    STEPS,
    VARIANTS,
)

from bench.derive.live_storage import LiveStorage

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cells(run_cells, wanted_cells, tmp_path_factory) -> Mapping:
    found = {}
    for ranks in (1, 2, 4):
        wanted = {n: c for n, c in wanted_cells(CELLS).items() if c.launch.ranks == ranks}
        # What DeepSpeed keeps after its deletion would count as memory of the cells behind it.
        leaving = {n: wanted.pop(n) for n in list(wanted) if n.startswith("deepspeed")}
        if wanted or leaving:
            found |= run_cells(tmp_path_factory.mktemp("cells"), wanted | leaving)
    return found


@pytest.mark.parametrize("name", [*FP32_CELLS, *VARIANTS])
def test_fp32_losses_and_norms_agree_with_the_single_process_to_1e_5(cells, name):
    assert cells[name].losses == pytest.approx(cells["single"].losses, rel=1e-5)
    assert cells[name].norms == pytest.approx(cells["single"].norms, rel=1e-5)


@pytest.mark.parametrize("name", [*FP64_CELLS, *HYBRID_CELLS])
def test_fp64_losses_and_norms_agree_with_the_single_process_to_1e_12(cells, name):
    kind = "hybrid" if name in HYBRID_CELLS else "muon" if "muon" in name else "fp64"
    single = cells[f"single-{kind}"]
    assert cells[name].losses == pytest.approx(single.losses, rel=1e-12)
    assert cells[name].norms == pytest.approx(single.norms, rel=1e-11)


@pytest.mark.parametrize("name", BF16_CELLS)
def test_bf16_losses_stay_near_those_of_the_single_process_but_are_not_its_own(cells, name):
    single, close = ("single-hybrid", 5e-3) if "-hybrid" in name else ("single", 2e-3)
    assert cells[name].losses == pytest.approx(cells[single].losses, rel=close)
    assert cells[name].losses != pytest.approx(cells[single].losses, rel=1e-6)


@pytest.mark.parametrize("name", ["single", "single-hybrid"])
def test_the_model_learns(cells, name):
    losses = cells[name].losses
    assert losses[0] == pytest.approx(math.log(256), rel=0.02)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("name", [*PARALLEL_CELLS, *FP64_CELLS])
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
    "fsdp2-optim_grads": 2 * REDUCE_SCATTER + GATHER,
    "fsdp2-optim_grads_params": 2 * REDUCE_SCATTER + SHARDED_GATHERS + 2 * ROOT / 2,
    # Of four ranks a layer comes whole from three and, kept on pairs, its other half from one.
    "fsdp2-reshard_to_2": 2 * 3 / 4 * (PARAMETERS + ROOT) + 2 * (3 / 4 + 1 / 2) * LAYERS * LAYER,
    # The norms read their weights twice, and each read is a gather.
    "simple_fsdp-optim_grads": 2 * REDUCE_SCATTER + 2 * (GATHER + NORMS / 2),
    # Every weight once per pass; the embedding's backward pass reads no weight.
    "simple_fsdp-optim_grads_params": 2 * REDUCE_SCATTER
    + 2 * (2 * GATHER + NORMS / 2 - 256 * 128 / 2),
    "mfsdp-no_shard": ALL_REDUCE,
    "mfsdp-optim": REDUCE_SCATTER + GATHER,
    "mfsdp-optim_grads": 2 * REDUCE_SCATTER + GATHER,
    "mfsdp-optim_grads_params": 2 * REDUCE_SCATTER + SHARDED_GATHERS + ROOT / 2,
    # A rank sends half of the gradients and weights that it holds, and half of what it has stepped.
    "mfsdp-muon-fp64": 2 * REDUCE_SCATTER
    + SHARDED_GATHERS
    + ROOT / 2
    + 3 / 4 * LAYERS * (LAYER - 2 * 128),
}
#: Of two bytes: what computes and sends in BF16.
ELEMENTS_SENT_PER_STEP |= {
    "ddp-bf16": ELEMENTS_SENT_PER_STEP["ddp"],
    "fsdp2-bf16": ELEMENTS_SENT_PER_STEP["fsdp2-optim_grads_params"],
    "mfsdp-bf16": ELEMENTS_SENT_PER_STEP["mfsdp-optim_grads_params"],
    "mfsdp-no_shard-bf16": ELEMENTS_SENT_PER_STEP["mfsdp-no_shard"],
    "mfsdp-front-bf16": ELEMENTS_SENT_PER_STEP["fsdp2-optim_grads_params"],
    "mfsdp-front-reshard_to_2": ELEMENTS_SENT_PER_STEP["fsdp2-reshard_to_2"],
    "mfsdp-front-optim_grads": ELEMENTS_SENT_PER_STEP["mfsdp-optim_grads"],
}


@pytest.mark.parametrize("name", ELEMENTS_SENT_PER_STEP)
def test_bytes_sent_follow_from_the_schedule(cells, name):
    (sent,) = {sample.wire_bytes for sample in cells[name].samples()[1:]}
    size = {"bf16": 2, "fp64": 8}.get(name[-4:], 4)
    padding = 0.005 if name.startswith("mfsdp") else 0
    padding *= 2 if name == "mfsdp-front-reshard_to_2" else 1  # of four ranks
    assert sent == pytest.approx(size * ELEMENTS_SENT_PER_STEP[name], rel=padding)


def ledger(finished) -> dict[str, int]:
    return finished.document("memory.json")["by_category_bytes"]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, 1) for name in ("single", "ddp", "mfsdp-no_shard")),
        *((name, 2) for name in ("fsdp2-bf16", "mfsdp-bf16", "mfsdp-front-bf16")),
    ],
)
def test_a_replica_holds_all_that_is_persistent_and_a_shard_its_part(cells, name, ranks):
    found = ledger(cells[name])
    for category, size in {"main_weights": 4, "gradients": 4, "optimizer_state": 8}.items():
        assert found[category] == pytest.approx(size * PARAMETERS / ranks, rel=0.005)
    if ranks == 1:
        assert found.get("compute_weights", 0) == pytest.approx(0, abs=0.005 * 4 * PARAMETERS)


def test_fsdp2_gathers_the_root_and_two_layers_at_most_and_reduces_a_layer(cells):
    found = ledger(cells["fsdp2-bf16"])
    assert found["compute_weights"] == 2 * (ROOT + 2 * LAYER)
    # The largest unit is a layer: gathered in bf16, reduced in bf16 from a full input to a half.
    assert found["communication_buffers"] == 2 * LAYER + 2 * LAYER + 2 * LAYER // 2


@pytest.mark.nightly  # as its cell is
def test_simple_fsdp_that_gathers_again_has_one_weight_whole_at_a_time(cells):
    found = ledger(cells["simple_fsdp-optim_grads_params"])
    assert found["compute_weights"] == 4 * 512 * 128  # that of a feed-forward layer


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("single", "bench/engines/single.py"),
        ("ddp", "torch/nn/parallel/distributed.py"),
        ("ddp_zero", "torch/distributed/optim/zero_redundancy_optimizer.py"),
        ("fsdp2-bf16", "torch/distributed/fsdp/_fully_shard/_fully_shard.py"),
        ("mfsdp-bf16", "mfsdp_core/__init__.py"),
    ],
)
def test_the_run_names_the_file_of_the_implementation_that_ran(cells, name, file):
    assert cells[name].document("runtime.json")["engine_code_path"].endswith(file)


def test_a_run_leaves_what_it_ran_on_and_what_it_held(cells):
    runtime = cells["single"].document("runtime.json")
    assert runtime["torch"] == torch.__version__
    assert (runtime["device_names"], runtime["backend"]) == ([], None)
    memory = cells["single"].document("memory.json")
    assert memory["rss_peak_bytes"] > 50 * 2**20
    assert memory["cpu_allocator_peak_bytes"] is None
    assert "activations" not in memory["by_category_bytes"]


def test_cells_of_every_engine_begin_with_the_same_bits(cells):
    starts = {name: cells[name].document("runtime.json")["start"] for name in cells}
    llama = {name: start for name, start in starts.items() if start.keys() == starts["ddp"].keys()}
    assert {"single", "ddp", "fsdp2-bf16", "mfsdp-bf16", "mfsdp-front"} <= llama.keys()
    assert all(start == starts["ddp"] for start in llama.values())


def test_a_run_leaves_the_plan_of_its_buffer_pools(cells):
    plan = cells["mfsdp-max_pool"].document("memory.json")["pool_plan"]
    assert plan["allocator"] == "max_pool"
    slots = {pool["role"]: pool["slots"] for pool in plan["pools"]}
    assert slots == {"compute_weights": 2, "grad_bucket": 2}
    units = [unit for unit in plan["units"] if unit["role"] == "compute_weights"]
    assert {unit["slot"] for unit in units} == {0, 1}


def test_what_meters_cost_is_part_of_the_record(cells):
    meters = [
        cells[name].document("runtime.json")["meters"] for name in PARALLEL_CELLS if name in cells
    ]
    names = {"cpu", "wire", "memory", "device", "samples"}
    assert all(set(each["seconds"]) == names for each in meters)
    assert all(each["steps"] == STEPS for each in meters)
    assert all(each["fraction_of_step_time"] > 0 for each in meters)


def live(cells, name) -> LiveStorage:
    return LiveStorage.model_validate(cells[name].document("memory.json")["live"])


@pytest.mark.parametrize(
    ("name", "size"),
    [
        # Main weights and two moments, sharded; rotary tables and scalars of the optimizer.
        ("fsdp2-optim_grads_params", 3 * 4 * PARAMETERS / 2),
        # The same and gradients, whole; the buckets are held by C++ alone.
        ("ddp", 4 * 4 * PARAMETERS),
        ("mfsdp-no_shard", 3 * 4 * PARAMETERS),
    ],
)
def test_live_storage_is_what_an_engine_must_hold(cells, name, size):
    found = live(cells, name)
    assert 0 < found.bytes_per_rank - size < 20_000
