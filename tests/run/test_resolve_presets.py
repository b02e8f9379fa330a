from __future__ import annotations

import pytest

from bench.errors import ConfigError
from bench.resolve.model_shape import resolve_shape
from bench.resolve.presets import PRESETS
from bench.spec import ModelSpec

# Published: config.json plus weights of each model; debug, tiny and bench-34m are ours.
PARAMETERS = {
    "debug": 1_049_728,
    "tiny": 14_817_792,
    "bench-34m": 34_087_424,
    "160m": 162_417_408,
    "1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    assert PRESETS[name].parameters == PARAMETERS[name]


def test_every_preset_is_checked_against_a_published_number() -> None:
    assert set(PRESETS) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_has_heads_that_fill_its_hidden_size(name: str) -> None:
    shape = PRESETS[name]
    assert shape.heads * shape.head_dim == shape.hidden
    assert shape.heads % shape.kv_heads == 0


def test_single_fields_replace_those_of_the_preset() -> None:
    shape = resolve_shape(ModelSpec(preset="tiny", layers=2, tie_embeddings=True))
    assert shape == PRESETS["tiny"].model_copy(update={"layers": 2, "tie_embeddings": True})


def test_the_head_dimension_follows_a_replaced_hidden_size() -> None:
    assert resolve_shape(ModelSpec(preset="tiny", hidden=256)).head_dim == 32


def test_an_unknown_preset_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'llama-8b'.*did you mean 'llama3-8b'"):
        resolve_shape(ModelSpec(preset="llama-8b"))


def test_heads_that_cannot_share_the_kv_heads_are_refused_with_those_that_can() -> None:
    with pytest.raises(ConfigError, match=r"kv_heads out of \[1, 2, 4, 8\]"):
        resolve_shape(ModelSpec(preset="tiny", kv_heads=3))


def test_a_hidden_size_that_heads_do_not_divide_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"hidden 500 is not divisible by heads 8.*496 or 504"):
        resolve_shape(ModelSpec(preset="tiny", hidden=500))


def test_an_odd_head_dimension_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be even"):
        resolve_shape(ModelSpec(preset="tiny", hidden=8 * 33))
