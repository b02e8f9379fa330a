from __future__ import annotations

from typing import get_args

import pytest
import torch

from bench.errors import ConfigError
from bench.models.build import empty_model
from bench.resolve.model_shape import resolve_shape
from bench.resolve.presets import PRESETS
from bench.resolve.resolution import resolve_anywhere
from bench.spec import GatherPrecisionName, LaunchSpec, ModelSpec, RecipeName, RunSpec
from mfsdp_core.plan.recipes import RECIPES, GatherPrecision

# Published: config.json plus weights of each model; debug, tiny ones, bench-34m, nano-1b: ours.
PARAMETERS = {
    "debug": 1_049_728,
    "tiny": 14_817_792,
    "bench-34m": 34_087_424,
    "160m": 162_417_408,
    "1b": 1_235_814_400,
    "3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "hybrid-tiny": 4_698_832,
    "nemotron3-nano-30b": 31_577_937_344,
    "nemotron3-nano-1b": 1_481_913_664,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    assert PRESETS[name].parameters == PARAMETERS[name]


@pytest.mark.parametrize(
    "spec",
    [
        *(ModelSpec(preset=name) for name in PARAMETERS),
        ModelSpec(tie_embeddings=True, kv_heads=1),
        ModelSpec(preset="hybrid-tiny", pattern="M*/E/-"),
    ],
    ids=str,
)
def test_a_shape_has_the_parameters_of_the_model_that_is_built(spec: ModelSpec) -> None:
    shape = resolve_shape(spec)
    with torch.device("meta"):
        model = empty_model(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters


def test_names_of_recipes_are_those_of_the_core() -> None:
    assert get_args(RecipeName) == ("none", *RECIPES)
    assert get_args(GatherPrecisionName) == get_args(GatherPrecision)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_has_heads_that_fill_its_hidden_size(name: str) -> None:
    shape = PRESETS[name]
    # Nemotron's 32 heads of 128 are wider than its hidden size of 2688.
    wider = name.startswith("nemotron")
    assert shape.heads * shape.head_dim == (4096 if wider else shape.hidden)
    assert shape.heads % shape.kv_heads == 0


def test_the_head_dimension_follows_a_replaced_hidden_size() -> None:
    assert resolve_shape(ModelSpec(preset="tiny", hidden=256)).head_dim == 32


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"preset": "llama-8b"}, r"unknown preset 'llama-8b'.*did you mean 'llama3-8b'"),
        ({"kv_heads": 3}, r"kv_heads out of \[1, 2, 4, 8\]"),
        ({"hidden": 500}, r"hidden 500 is not divisible by heads 8.*496 or 504"),
        ({"hidden": 8 * 33}, "must be even"),
        *(
            (
                {field: "MM" if field == "pattern" else 2},
                rf"model\.{field}: tiny is a Llama.*hybrid-",
            )
            for field in ("pattern", "experts", "experts_per_token")
        ),
        *(
            ({"preset": "hybrid-tiny", **fields}, message)
            for fields, message in (
                (
                    {"pattern": "MXE"},
                    r"one letter per block out of M Mamba-2.*- feed-forward, .*; found 'X'",
                ),
                ({"pattern": ""}, "found no block at all"),
                ({"pattern": "M/"}, "'M/' has no block before or behind a '/'"),
                ({"layers": 3}, r"3 blocks do not fit the pattern 'MEM\*EMEM\*E', which spells 10"),
                ({"experts_per_token": 9}, "cannot visit 9 of 8 experts; choose at most 8"),
                ({"experts": 1}, "cannot visit 2 of 1 experts"),
            )
        ),
    ],
)
def test_what_is_no_model_is_refused_with_what_could_be_meant(fields, says) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_shape(ModelSpec.model_validate({"preset": "tiny", **fields}))


def test_a_hybrid_counts_its_blocks_from_its_pattern() -> None:
    shape = resolve_shape(ModelSpec(preset="hybrid-tiny", pattern="M-E*", experts=4))
    assert shape.hybrid is not None
    assert (shape.layers, shape.hybrid.pattern, shape.hybrid.experts) == (4, "M-E*", 4)


def test_a_pattern_of_more_blocks_than_anybody_trains_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 1000 characters"):
        ModelSpec(preset="hybrid-tiny", pattern="M*" * 501)


def test_only_what_differs_from_its_default_names_a_run() -> None:
    run = resolve_anywhere(RunSpec(model=ModelSpec(preset="tiny"), launch=LaunchSpec(ranks=2)))
    assert "hybrid" not in run.canonical_json()
    assert "allocator" not in run.canonical_json()
    other = RunSpec(model=ModelSpec(preset="hybrid-tiny"), launch=LaunchSpec(ranks=2))
    assert '"hybrid"' in resolve_anywhere(other).canonical_json()
