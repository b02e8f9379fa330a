"""Few layers stand for many; what `fit` cannot know it refuses."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
import torch
from small_runs import BF16, ZERO3, small_run

from bench.cli.fit import predictions
from bench.derive.flops import recomputed_flops
from bench.errors import UnsupportedError, UsageError
from bench.fit import prediction
from bench.fit.dataless import tensors_without_data
from bench.fit.prediction import HEADROOM_BYTES, Verdict, predict
from bench.fit.search import fewest_gpus, search
from bench.fit.trace import trace
from bench.fit.transformer_engine_layers import layers_as_storages
from bench.models.build import model_on_meta
from bench.resolve.machine import described_machine
from bench.spec import RunSpec

MFSDP = ZERO3
run = partial(small_run, model={"preset": "debug", "layers": 4})


@pytest.mark.parametrize(
    "engine", [MFSDP, MFSDP | {"name": "fsdp2"}, {"name": "ddp"}], ids=lambda one: one["name"]
)
def test_layers_that_repeat_are_what_a_whole_trace_says(engine):
    asked = run(engine, launch={"ranks": 4}, model={"preset": "debug", "layers": 6}, dtypes=BF16)
    few, whole = predict(asked), predict(asked, every_layer=True)
    assert few.is_linear
    assert (few.peak_bytes, few.peak_moment) == (whole.peak_bytes, whole.peak_moment)
    assert few.by_category == whole.by_category
    assert few.collectives == whole.collectives
    assert few.wire_bytes == whole.wire_bytes


def test_tensors_that_torch_makes_to_ask_for_shapes_take_no_memory():
    """DTensor does, once in a process for every shape: for the first trace, not for the second."""
    model = {"preset": "debug", "layers": 7, "vocab": 7001}
    asked = run({"name": "fsdp2", "strategy": "optim_grads_params"}, model=model)
    few, whole = predict(asked, check=False), predict(asked, every_layer=True)
    assert few.setup_bytes == whole.setup_bytes


def test_ddp_holds_and_sends_what_a_profiled_run_of_two_ranks_did():
    """docs/evidence/2026-11-23-fit.md."""
    train = {"steps": 3, "global_batch": 4, "micro_batch": 2, "seq_len": 128}
    found = predict(run({"name": "ddp"}, model={"preset": "debug", "layers": 5}, train=train))
    assert (found.peak_bytes, found.wire_bytes) == (38_364_360, 5_182_976)


def test_logits_are_logits_beside_tensor_parallelism():
    model, long = (
        {"preset": "debug", "layers": 4, "vocab": 1024},
        {"global_batch": 2, "seq_len": 256},
    )
    alone, cut = (
        predict(run(MFSDP | {"tensor_parallel": size}, model=model, train=long)) for size in (1, 2)
    )
    most = [max(step.get("logits_and_loss", 0) for _, step in one.steps) for one in (alone, cut)]
    assert most[1] >= most[0] > 0


def test_microbatches_that_repeat_send_what_a_whole_step_sends(monkeypatch):
    asked = run(MFSDP, train={"global_batch": 10})
    few = predict(asked)
    monkeypatch.setattr("bench.fit.trace.MICROBATCHES", 5)
    monkeypatch.setattr(prediction, "MICROBATCHES", 5)
    whole = predict(asked)
    assert few.wire_bytes == whole.wire_bytes
    assert few.collectives == whole.collectives
    assert few.peak_bytes == whole.peak_bytes


def test_layers_that_do_not_add_up_are_said(monkeypatch):
    def with_more_in_the_fifth(resolved):
        found = trace(resolved)
        if found.units == 5:
            number, _, at = next(one for one in found.changes if one[2] >= found.first)
            found.changes.append((number, 1 << 40, at))
        return found

    monkeypatch.setattr(prediction, "trace", with_more_in_the_fifth)
    asked = run(MFSDP, model={"preset": "debug", "layers": 7})
    assert predict(asked).is_linear is False


@pytest.mark.parametrize("own", [{}, {"front": "fsdp2"}, {"name": "fsdp2"}], ids=str)
def test_offload_leaves_what_is_computed_with_on_the_device(own):
    """The host has, per weight of a rank, 4 numbers in FP32, and what a step makes of one shard."""
    engine = MFSDP | own
    with_and_without = (run(engine | {"offload": on}, dtypes=BF16) for on in (True, False))
    host, device = (predict(one, every_layer=True) for one in with_and_without)
    share = device.resolved.shape.parameters / device.resolved.launch.ranks
    assert 16 * share <= host.host_bytes < 17.5 * share
    assert device.host_bytes == 0
    assert {"main_weights", "optimizer_state"} & host.by_category.keys() == set()
    assert host.peak_bytes <= device.peak_bytes - 12 * share


def test_a_model_far_larger_than_this_machine_is_predicted():
    asked = run(
        MFSDP,
        model={"preset": "llama3-70b"},
        train={"seq_len": 8192, "global_batch": 1024},
        dtypes=BF16,
        launch={"ranks": 1024, "device": "cuda", "nodes": 128},
    )
    found = predict(asked, check=False)
    parameters = asked.shape.parameters
    # Sharded by whole rows: a share, and padding of a few percent.
    share = 4 * parameters / 1024
    assert share <= found.by_category["main_weights"] < 1.05 * share
    json.dumps(found.to_document())


@pytest.mark.parametrize("preset", ["hybrid-tiny"])
def test_experts_of_a_hybrid_are_chosen_without_contents(preset):
    found = predict(run(MFSDP, model={"preset": preset}, dtypes=BF16))
    assert found.is_linear is None
    assert found.by_category["activations"] > 0


def test_what_no_trace_can_know_is_refused():
    with pytest.raises(UnsupportedError, match="in BF16 alone"):
        predict(run(MFSDP, model={"preset": "hybrid-tiny"}))


TE = {"preset": "debug", "layers": 6, "linear": "transformer_engine"}
WIDE, ROWS = 512, 128


@pytest.mark.parametrize(
    ("recipe", "input_bytes", "weight_bytes"),
    [  # by their definitions: codes, and a scale per tensor, per 128, per 32 or per 16
        ("DelayedScaling", ROWS * WIDE + 4, 2 * (WIDE * WIDE + 4)),
        ("Float8CurrentScaling", ROWS * WIDE + 4, 2 * (WIDE * WIDE + 4)),
        ("Float8BlockScaling", ROWS * WIDE * (1 + 4 / 128), 2 * WIDE * WIDE * (1 + 4 / 128**2)),
        ("MXFP8BlockScaling", ROWS * WIDE * (1 + 1 / 32), 2 * WIDE * WIDE * (1 + 1 / 32)),
        ("NVFP4BlockScaling", ROWS * WIDE * (1 / 2 + 1 / 16), WIDE * WIDE * (1 + 1 / 8)),
    ],
)
def test_a_layer_of_transformer_engine_keeps_codes_of_input_and_weight(
    recipe, input_bytes, weight_bytes
):
    alive = {}
    with (
        layers_as_storages(),
        tensors_without_data(
            lambda number, change, *_: alive.update({number: alive.get(number, 0) + change}), None
        ),
    ):
        te = importlib.import_module("transformer_engine.pytorch")
        names = importlib.import_module("transformer_engine.common.recipe")
        with te.quantized_model_init(False, getattr(names, recipe)(), True):
            layer = te.Linear(WIDE, WIDE, params_dtype=torch.bfloat16)
        layer.reset_parameters()
        inputs = torch.empty(ROWS, WIDE, dtype=torch.bfloat16, requires_grad=True)
        before = sum(alive.values())
        out = layer(inputs)
        assert sum(alive.values()) - before - out.nbytes == input_bytes + weight_bytes
        out.sum().backward()
        assert layer.weight.grad.shape == layer.weight.shape


@pytest.mark.parametrize(
    "recipe", ["current", pytest.param("block", marks=pytest.mark.nightly), "mxfp8"]
)
def test_weights_kept_as_codes_take_and_send_a_byte_each(recipe):
    model = TE | {"linear_recipe": recipe, "quantised_weights": True}
    engine = MFSDP | {"fine_grained_gather": recipe == "mxfp8"}
    asked = run(engine, model=model, dtypes=BF16, launch={"ranks": 2, "device": "cuda"})
    found, shape = predict(asked), asked.shape
    codes = sum(
        math.prod(weight.shape)
        for name, weight in model_on_meta(shape, recompute="none", seed=0).named_parameters()
        if "layers" in name and weight.dim() > 1
    )
    directions = 2 if recipe == "mxfp8" else 1
    assert found.is_linear
    assert found.by_category["compute_weights"] == directions * codes / 2
    gathers = [one for one in found.collectives if one.operation.startswith("allgather")]
    sent = sum(one.count * one.bytes for one in gathers)
    others = 2 * (shape.parameters - codes)
    assert codes * 2 * asked.microbatches <= sent <= (codes + others) * 2 * asked.microbatches


def test_user_buffers_are_memory_of_the_same_size_and_a_captured_step_is_refused():
    pooled = MFSDP | {"allocator": "fixed_pool", "double_buffer": True}
    on_cuda = {"launch": {"ranks": 2, "device": "cuda"}, "dtypes": BF16 | {"grad_comm": "fp32"}}
    registered = run(pooled | {"nccl_ub": True, "manual_registration": True}, **on_cuda)
    assert registered.engine.setting("nccl_ub")
    assert predict(registered).by_category == predict(run(pooled, **on_cuda)).by_category
    with pytest.raises(UnsupportedError, match="captured step"):
        predict(run(MFSDP | {"allocator": "fixed_pool", "cuda_graph": True}, **on_cuda))


def test_what_an_engine_asks_of_a_device_is_a_refusal(monkeypatch):
    def missing(*_asked):
        raise ModuleNotFoundError("no such package")

    monkeypatch.setattr("bench.fit.trace.build_engine", missing)
    with pytest.raises(UnsupportedError, match="without a device: ModuleNotFoundError: no such"):
        predict(run(MFSDP))


def test_ranks_that_share_a_device_have_parts_of_it():
    found = predict(run(MFSDP))
    launch = found.resolved.launch.model_copy(update={"ranks_per_device": 2})
    shared = replace(found, resolved=found.resolved.model_copy(update={"launch": launch}))
    verdict = Verdict.of(shared, described_machine("H100", 8))
    assert verdict.spare_bytes == 40 * 10**9 - HEADROOM_BYTES - found.peak_bytes


@pytest.mark.usefixtures("world_of_one")
def test_a_process_that_is_a_rank_already_is_refused():
    with pytest.raises(UsageError, match="process group"):
        predict(run(MFSDP))


def test_a_verdict_names_the_bytes_and_the_category_to_attack():
    machine = described_machine("H100", 8)
    found = predict(run(MFSDP))
    assert Verdict.of(found, machine).fits
    moment, _ = found.steps[0]
    large = replace(found, steps=((moment, {"activations": 90 * 10**9, "gradients": 5}),))
    verdict = Verdict.of(large, machine)
    assert not verdict.fits
    assert verdict.spare_bytes == 80 * 10**9 - HEADROOM_BYTES - 90 * 10**9 - 5
    assert verdict.largest == "activations"


def test_cells_of_equal_memory_are_traced_once(monkeypatch):
    traced = []
    monkeypatch.setattr(prediction, "trace", lambda one: traced.append(one) or trace(one))
    on_cuda = {"ranks": 2, "device": "cuda"}
    runs = {
        "plain": run({"name": "ddp"}, launch=on_cuda),
        "again": run({"name": "ddp"}, launch=on_cuda, train={"lr": 0.5}),
        "unknown": run(MFSDP | {"cuda_graph": True, "allocator": "fixed_pool"}, launch=on_cuda),
    }
    found = predictions(runs)
    assert "captured step" in found["unknown"].reason
    assert found["again"].peak_bytes == found["plain"].peak_bytes
    assert found["again"].resolved == runs["again"]
    assert [one.engine.name for one in traced] == ["ddp", "mfsdp"]


def test_a_loss_in_chunks_holds_the_logits_of_one_and_computes_the_head_twice():
    wide = {"preset": "debug", "layers": 4, "vocab": 4096}
    whole, parts = run(MFSDP, model=wide), run(MFSDP, model=wide | {"loss_chunks": 8})

    def logits(asked):
        return max(held.get("logits_and_loss", 0) for _, held in predict(asked).steps)

    assert logits(parts) == logits(whole) / 8
    head = 2 * whole.shape.vocab * whole.shape.hidden
    tokens = whole.train.micro_batch * whole.microbatches * whole.train.seq_len
    assert recomputed_flops(parts) - recomputed_flops(whole) == head * tokens


def test_full_recomputation_costs_a_forward_pass_of_all_but_the_head():
    shape = run(MFSDP).shape
    whole = run(MFSDP, model={"preset": "debug", "layers": 4, "recompute": "full"})
    per_token = recomputed_flops(whole) / (2 * 32)
    products = 2 * (shape.parameters - 2 * shape.vocab * shape.hidden - 9 * shape.hidden)
    attention = 2 * 32 * shape.heads * shape.head_dim * shape.layers
    assert per_token == products + attention
    assert recomputed_flops(run(MFSDP)) == 0


def test_a_search_tries_dtypes_state_pools_and_hybrids_on_its_best(monkeypatch):
    found = predict(run(MFSDP))
    monkeypatch.setattr(
        "bench.fit.search.predict", lambda resolved, **_: replace(found, resolved=resolved)
    )
    machine = described_machine("H100", 16)
    spec = RunSpec.model_validate(
        {
            "engine": MFSDP,
            "dtypes": BF16,
            "train": {"global_batch": 128},
            "launch": {"ranks": 16, "nodes": 2, "device": "cuda"},
        }
    )
    tried = [{**one.switches} for one in search(spec, machine)]
    more = [one for one in tried if len(one) > 3]
    assert len(more) == 7
    assert all(one["model.recompute"] == "none" for one in more)
    assert {"engine.outer_size", "train.state_dtype", "engine.allocator"} <= {*chain(*more)}
    assert [one.switches["launch.ranks"] for one in fewest_gpus(spec, machine)] == [8]
