"""What a plan says of a model's parameters and of the memory that a run must have."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn

from bench.engines.dtypes import TORCH_DTYPES
from bench.engines.optimizer import build_optimizer, optimizer_state_bytes
from bench.models.build import empty_model
from bench.resolve import state_bytes
from bench.resolve.model_shape import resolve_shape
from bench.resolve.parameter_facts import parameter_facts
from bench.resolve.presets import PRESETS
from bench.resolve.resolution import resolve_anywhere
from bench.resolve.state_bytes import (
    gather_bytes,
    state_bytes_by_category,
    state_bytes_of_all_ranks,
)
from bench.spec import (
    DtypeSpec,
    EngineSpec,
    GatherPrecisionName,
    LaunchSpec,
    ModelShape,
    ModelSpec,
    RecipeName,
    ResolvedRun,
    RunSpec,
    TrainSpec,
)
from mfsdp_core.plan.grouping import ParameterFacts, plan_buckets
from mfsdp_core.plan.recipes import RECIPES, GatherPrecision

SHAPES = [
    *PRESETS.values(),
    resolve_shape(ModelSpec(tie_embeddings=True, kv_heads=1)),
    resolve_shape(ModelSpec(preset="hybrid-tiny", pattern="M*/E/-")),
]


def run_of(engine: EngineSpec, ranks: int, preset: str = "debug", **dtypes: str) -> ResolvedRun:
    return resolve_anywhere(
        RunSpec(
            model=ModelSpec(preset=preset),
            engine=engine,
            dtypes=DtypeSpec(**dtypes),
            train=TrainSpec(global_batch=8 * ranks),
            launch=LaunchSpec(ranks=ranks),
        )
    )


def facts(preset: str) -> list[ParameterFacts]:
    return list(parameter_facts(run_of(EngineSpec(name="mfsdp"), 2, preset).shape, "fp32"))


def unit_of(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.preset)
def test_the_facts_of_a_shape_are_those_of_the_model_that_is_built(shape: ModelShape) -> None:
    with torch.device("meta"):
        model = empty_model(shape)
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    facts = parameter_facts(shape, "bf16")
    assert [(f.names, f.shape) for f in facts] == [
        (tuple(names), tuple(parameter.shape)) for parameter, names in found.values()
    ]
    for fact in facts:
        assert fact.units == tuple(unit_of(name) for name in fact.names)
    assert sum(p.numel() for p, _ in found.values()) == shape.parameters


def test_hfsdp_shards_optimizer_state_over_all_ranks_and_gradients_over_the_inner_ones() -> None:
    sharding = {"strategy": "optim_grads_params", "outer_size": 2}
    engines = {
        outer: EngineSpec(name="mfsdp", outer_strategy=outer, **sharding)
        for outer in ("no_shard", "optim")
    }
    dtypes = {"compute": "bf16", "main_grads": "fp32"}
    hsdp, hfsdp = (
        state_bytes_by_category(run_of(engines[outer], 8, "llama3-8b", **dtypes))
        for outer in ("no_shard", "optim")
    )
    assert hfsdp["main_weights"] == pytest.approx(hsdp["main_weights"] / 2, rel=0.01)
    assert hfsdp["optimizer_state"] == pytest.approx(hsdp["optimizer_state"] / 2, rel=0.01)
    assert hfsdp["gradients"] == pytest.approx(hsdp["gradients"], rel=0.01)
    assert hsdp["main_weights"] == pytest.approx(8.03e9 * 4 / 4, rel=0.01)


def test_pools_count_with_every_slot_and_nothing_else_changes() -> None:
    plain = state_bytes_by_category(run_of(EngineSpec(name="mfsdp"), 2, "hybrid-tiny"))
    pooled = {
        slots: state_bytes_by_category(
            run_of(
                EngineSpec(
                    name="mfsdp", allocator="max_pool", double_buffer=True, pool_slots=slots
                ),
                2,
                "hybrid-tiny",
            )
        )
        for slots in (2, 3)
    }
    # The largest unit of the hybrid, in FP32, is what every slot has room for.
    largest = max(plan.layout.total_elements for plan in plan_buckets(facts("hybrid-tiny"), 2))
    for slots, found in pooled.items():
        assert found["communication_buffers"] == slots * 4 * largest
        assert found["compute_weights"] - plain.get("compute_weights", 0) == slots * 4 * largest
        assert found["main_weights"] == plain["main_weights"]


def test_decoupled_gradients_are_not_cast_for_the_optimizer() -> None:
    dtypes = {"compute": "bf16", "main_grads": "bf16"}
    engines = [EngineSpec(name="mfsdp", decoupled_grad=on) for on in (False, True)]
    train = TrainSpec(global_batch=16, optimizer="precision_aware_adamw")
    cast, kept = (
        state_bytes_by_category(run_of(engine, 2, **dtypes).model_copy(update={"train": train}))[
            "gradients"
        ]
        for engine in engines
    )
    assert cast == 3 * kept  # BF16, and an FP32 copy of it


def test_the_ranks_chunks_of_fsdp2_add_up_to_the_whole() -> None:
    whole = state_bytes_by_category(run_of(EngineSpec(name="single"), 1))
    run = run_of(EngineSpec(name="fsdp2"), 3)
    chunks = [state_bytes_by_category(run, rank) for rank in range(3)]
    for category in ("main_weights", "gradients"):
        assert sum(chunk[category] for chunk in chunks) == whole[category]
    assert chunks[0]["main_weights"] == max(chunk["main_weights"] for chunk in chunks)


AWARE = {"optimizer": "precision_aware_adamw"}


@pytest.mark.parametrize(
    ("settings", "main"),
    [
        ({}, "fp32"),
        ({"optimizer": "sgd"}, "fp32"),
        (AWARE | {"state_dtype": "bf16", "master_weights": True}, "fp32"),
        (AWARE | {"master_weights": True}, "bf16"),
        (AWARE | {"store_remainders": True}, "bf16"),
        pytest.param({"optimizer": "adamw_8bit"}, "fp32", marks=pytest.mark.needs("torchao")),
        pytest.param({"optimizer": "adamw_fp8"}, "fp32", marks=pytest.mark.needs("torchao")),
    ],
)
def test_the_bytes_of_optimizer_state_are_those_that_the_optimizer_makes(
    settings: dict[str, Any], main: str
) -> None:
    train = TrainSpec(**settings)
    run = run_of(EngineSpec(name="mfsdp", strategy="no_shard"), 1, compute=main, main_params=main)
    run = run.model_copy(update={"train": train})
    model = empty_model(run.shape).to(TORCH_DTYPES[main])
    optimizer = build_optimizer(model.parameters(), train)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    expected = state_bytes_by_category(run).get("optimizer_state", 0)
    assert optimizer_state_bytes(optimizer) == expected


@pytest.mark.parametrize(
    ("recipe", "precision", "of_matrices"),
    [
        ("current", "recipe", {"uint8": 1.0}),
        ("block", "compute", {"bfloat16": 2.0}),
        ("mxfp8", "recipe", {"uint8": 1 + 1 / 32}),
        ("nvfp4", "recipe", {"uint8": 0.5 + 1 / 16}),
    ],
)
def test_a_plan_predicts_the_bytes_of_a_gather(
    recipe: str, precision: str, of_matrices: dict[str, float]
) -> None:
    run = run_of(
        EngineSpec(name="mfsdp", recipe=recipe, gather_precision=precision), 2, compute="bf16"
    )
    shapes = [fact.shape for fact in parameter_facts(run.shape, "bf16")]
    matrices = sum(s[0] * s[1] for s in shapes if len(s) > 1)
    vectors = sum(s[0] for s in shapes if len(s) == 1)
    expected = {dtype: int(each * matrices) for dtype, each in of_matrices.items()}
    expected["bfloat16"] = expected.get("bfloat16", 0) + 2 * vectors
    assert gather_bytes(run) == expected


def test_a_plan_predicts_no_bytes_of_codes_that_layers_of_others_keep() -> None:
    model = ModelSpec(linear="torchao", quantised_weights=True)
    run = resolve_anywhere(RunSpec(model=model, engine=EngineSpec(name="mfsdp")))
    assert gather_bytes(run) == {} == state_bytes_by_category(run)
    assert state_bytes_of_all_ranks(run) is None


def test_names_of_recipes_are_those_of_the_core() -> None:
    assert get_args(RecipeName) == ("none", *RECIPES)
    assert get_args(GatherPrecisionName) == get_args(GatherPrecision)


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp1", "fsdp2", "mfsdp"])
def test_a_model_of_a_billion_layers_is_counted(engine):
    strategy = {"single": None, "ddp": "no_shard"}.get(engine, "optim_grads_params")
    run = run_of(EngineSpec(name=engine, strategy=strategy), 1 if engine == "single" else 2)
    layer = run.shape.model_copy(update={"layers": 1}).parameters
    layer -= run.shape.model_copy(update={"layers": 0}).parameters
    tall = run.model_copy(update={"shape": run.shape.model_copy(update={"layers": 999_999_999})})
    # FP32 weights, gradients and two moments of every layer.
    least = 999_999_999 * layer * 16
    assert least < state_bytes_of_all_ranks(tall) < 2.1 * least
    assert (sum(gather_bytes(tall).values()) > least // 8) == (engine == "mfsdp")


@pytest.mark.parametrize("settings", [
    {"strategy": "no_shard"},
    {"strategy": "optim"},
    {"strategy": "optim_grads"},
    {},
    {"allocator": "fixed_pool"},
    {"allocator": "fixed_pool", "pool_slots": 7},
    {"allocator": "max_pool", "pool_slots": 30},
    {"recipe": "mxfp8"},
    {"recipe": "block", "allocator": "fixed_pool"},
])  # fmt: skip
@pytest.mark.parametrize("layers", [3, 6, 9, 24])
def test_layers_that_are_counted_take_what_layers_take_that_are_listed(
    monkeypatch, settings, layers
):
    engine = EngineSpec(**{"name": "mfsdp", "strategy": "optim_grads_params", **settings})
    run = run_of(engine, 2)
    run = run.model_copy(update={"shape": run.shape.model_copy(update={"layers": layers})})
    listed = state_bytes_by_category(run), state_bytes_by_category(run, 1), gather_bytes(run)
    assert any(listed)
    monkeypatch.setattr(state_bytes, "_LISTED_LAYERS", 2)
    assert listed == (
        state_bytes_by_category(run), state_bytes_by_category(run, 1), gather_bytes(run)
    )  # fmt: skip


def test_a_pattern_of_more_blocks_than_anybody_trains_is_refused():
    with pytest.raises(ValueError, match="at most 1000 characters"):
        ModelSpec(preset="hybrid-tiny", pattern="M*" * 501)
