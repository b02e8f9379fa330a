"""A Hugging Face config.json of the Llama family as a model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from bench.errors import ConfigError
from bench.models.build import empty_model
from bench.models.llama import stretched
from bench.resolve.model_shape import resolve_shape
from bench.resolve.presets import PRESETS
from bench.spec import ModelSpec, RopeScaling

LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
#: The numbers of config.json of meta-llama/Llama-3.2-1B.
LLAMA_3_2_1B = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_SCALING,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


@pytest.fixture
def config(tmp_path: Path):
    """`config(**changes)`: the path of a file; a change to None leaves the field out."""

    def write(**changes: object) -> str:
        folder = tmp_path / "Llama-3.2 1B"
        folder.mkdir(exist_ok=True)
        document = {k: v for k, v in (LLAMA_3_2_1B | changes).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(document))
        return str(folder / "config.json")

    return write


def test_a_published_configuration_is_the_preset_of_that_model(config) -> None:
    shape = resolve_shape(ModelSpec(config=config()))
    assert shape is not None
    same = shape.model_copy(update={"preset": "1b", "rope_scaling": None})
    assert same == PRESETS["1b"]
    assert shape.parameters == 1_235_814_400
    assert shape.preset == "llama-3.2_1b"
    assert shape.rope_scaling == RopeScaling(kind="llama3", factor=32.0, original_positions=8192)


def test_fields_that_are_left_out_have_the_defaults_of_the_library(config) -> None:
    path = config(num_key_value_heads=None, head_dim=None, rope_scaling=None, rope_theta=None)
    shape = resolve_shape(ModelSpec(config=path))
    assert shape is not None
    assert (shape.kv_heads, shape.head_dim, shape.rope_theta) == (32, 64, 10_000.0)


def test_the_newer_form_of_rope_parameters_is_read(config) -> None:
    newer = {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 5e5}}
    path = config(rope_scaling=None, rope_theta=None, **newer)
    assert resolve_shape(ModelSpec(config=path)) == resolve_shape(ModelSpec(config=config()))


def test_single_fields_are_replaced_as_in_a_preset_and_the_model_can_be_built(config) -> None:
    model = ModelSpec(config=config(), layers=2, hidden=64, heads=4, kv_heads=2, vocab=256)
    shape = resolve_shape(model)
    assert shape is not None
    with torch.device("meta"):
        built = empty_model(shape)
    assert sum(p.numel() for p in built.parameters()) == shape.parameters
    assert built.head.weight is built.embedding.weight


#: Those of Qwen/Qwen2-0.5B and of mistralai/Mistral-7B-v0.3.
QWEN2_0_5B = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "head_dim": 64}
QWEN2_0_5B |= {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
QWEN2_0_5B |= {"vocab_size": 151_936, "use_sliding_window": False, "sliding_window": 32_768}
MISTRAL_7B = {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14_336}
MISTRAL_7B |= {"num_hidden_layers": 32, "vocab_size": 32_768, "head_dim": 128}
MISTRAL_7B |= {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("of", "parameters"), [(QWEN2_0_5B, 494_032_768), (MISTRAL_7B, 7_248_023_552)]
)
def test_llamas_under_other_names_have_their_published_parameters(config, of, parameters) -> None:
    path = config(**of)
    if of is MISTRAL_7B:
        document = json.loads(Path(path).read_text()) | {"sliding_window": None}
        Path(path).write_text(json.dumps(document))
    shape = resolve_shape(ModelSpec(config=path))
    assert shape is not None
    assert shape.parameters == parameters
    with torch.device("meta"):
        built = empty_model(shape)
    assert sum(p.numel() for p in built.parameters()) == parameters


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gemma"}, "expected model_type llama, mistral or qwen2, found 'gemma'"),
        ({"model_type": "mistral"}, "expected sliding_window null, found 4096"),
        ({"model_type": "qwen2", "vocab_size": None}, "expected a value for vocab_size, found"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "expected use_sliding_window False"),
        ({"quantization_config": {"bits": 4}}, "expected quantization_config None"),
        ({"hidden_act": "gelu"}, "expected hidden_act 'silu', found 'gelu'"),
        ({"attention_bias": True}, "expected attention_bias False, found True"),
        ({"hidden_size": None}, "expected a value for hidden_size, found none"),
        ({"hidden_size": "wide", "head_dim": 64}, "expected numbers that make a model"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "expected a rope_type of default, linear or"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor' of the rope"),
        ({"head_dim": 63}, "expected an even head_dim, found 63"),
    ],
)
def test_another_model_is_refused_in_words(config, changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=r"^model\.config: .*config\.json: ") as refused:
        resolve_shape(ModelSpec(config=config(**changes)))
    assert says in str(refused.value)


@pytest.mark.parametrize("content", [None, "", "[]", "{", "[" * 100_000])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"^model\.config: "):
        resolve_shape(ModelSpec(config=str(file)))


def test_rope_scaling_of_llama3_follows_its_three_ranges() -> None:
    scaling = RopeScaling(kind="llama3", factor=8.0, original_positions=8192)
    frequencies = 500_000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    wanted = []
    for frequency in frequencies.tolist():
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            wanted.append(frequency)
        elif wavelength > 8192 / 1:
            wanted.append(frequency / 8)
        else:
            share = (8192 / wavelength - 1) / (4 - 1)
            wanted.append((1 - share) * frequency / 8 + share * frequency)
    assert stretched(frequencies, scaling).tolist() == pytest.approx(wanted, rel=1e-12)
    assert 0 < sum(a != b for a, b in zip(wanted, frequencies.tolist(), strict=True)) < 64


def test_linear_rope_scaling_divides_every_frequency() -> None:
    frequencies = torch.tensor([1.0, 0.1], dtype=torch.float64)
    scaled = stretched(frequencies, RopeScaling(kind="linear", factor=4.0))
    assert scaled.tolist() == pytest.approx([0.25, 0.025])
