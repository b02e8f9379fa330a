"""The architecture that a Hugging Face `config.json` of the Llama family describes.

Read by the meaning of its fields in the `transformers` library's LlamaConfig, whose defaults stand
where a field is missing. Mistral is a Llama unless it looks back no further than a window; Qwen2 is
one with biases of query, key and value; their defaults differ, so more must be written out.
Whatever would make another model than `bench.models.llama` is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.errors import ConfigError
from bench.spec import ModelShape, RopeScaling

_KINDS = ("llama", "mistral", "qwen2")
_MAX_BYTES = 1 << 20
_REQUIRED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
_REQUIRED_OF_OTHERS = ("num_key_value_heads", "vocab_size")
#: Fields that must be absent, or have this value.
_ONLY: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
    "use_sliding_window": False,
    "quantization_config": None,
}


def read_config(path: str) -> ModelShape:
    """The shape that the file at `path` describes, named after its folder or itself.

    Raises:
        ConfigError: no such file, not a configuration, or of a model that is not a Llama.
    """
    file = Path(path).expanduser()
    document = _document(file)
    kind = document.get("model_type")
    if kind not in _KINDS:
        wanted = f"model_type {', '.join(_KINDS[:-1])} or {_KINDS[-1]}"
        raise _refusal(file, wanted, f"{kind!r}", "choose another file")
    required = _REQUIRED if kind == "llama" else (*_REQUIRED, *_REQUIRED_OF_OTHERS)
    missing = [name for name in required if name not in document]
    if missing:
        raise _refusal(file, "a value for " + ", ".join(missing), "none", "add what is missing")
    for name, only in _ONLY.items():
        value = document.get(name, only)
        if value != only:
            raise _refusal(
                file, f"{name} {only!r}", f"{value!r}", "the built-in Llama has nothing else"
            )
    window = document.get("sliding_window", 4096) if kind == "mistral" else None
    if window is not None:
        change = f"write null where sequences have at most {window} tokens"
        raise _refusal(file, "sliding_window null", f"{window}", change)
    try:
        return _shape(file, document)
    except KeyError as error:
        raise _refusal(file, f"{error} of the rope scaling", "none", "add it") from error
    except (ValidationError, TypeError, ZeroDivisionError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise _refusal(file, "numbers that make a model", what, "correct the file") from error


def _shape(file: Path, document: Mapping[str, Any]) -> ModelShape:
    hidden, heads = document["hidden_size"], document["num_attention_heads"]
    head_dim = document.get("head_dim") or hidden // heads
    if head_dim % 2:
        raise _refusal(file, "an even head_dim", str(head_dim), "rotary embeddings turn pairs")
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    return ModelShape(
        preset=_name(file),
        layers=document["num_hidden_layers"],
        hidden=hidden,
        ffn_hidden=document["intermediate_size"],
        heads=heads,
        kv_heads=document.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab=document.get("vocab_size", 32_000),
        tie_embeddings=document.get("tie_word_embeddings", False),
        rope_theta=document.get("rope_theta") or rope.get("rope_theta", 10_000.0),
        norm_eps=document.get("rms_norm_eps", 1e-6),
        rope_scaling=_scaling(file, rope),
        qkv_bias=document["model_type"] == "qwen2",
    )


def _scaling(file: Path, rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope["factor"])
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_positions=rope["original_max_position_embeddings"],
        )
    raise _refusal(
        file, "a rope_type of default, linear or llama3", f"{kind!r}", "remove it or change it"
    )


def _document(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
        document = json.loads(content) if len(content) <= _MAX_BYTES else None
    except OSError as error:
        described = error.strerror or "nothing"
        raise _refusal(file, "a config.json", described, "correct the path") from error
    except (ValueError, RecursionError) as error:
        raise _refusal(file, "a JSON object", "no valid JSON", "correct the file") from error
    if not isinstance(document, dict):
        raise _refusal(file, "a JSON object", "something else", "correct the file")
    return document


def _refusal(file: Path, expected: str, described: str, change: str) -> ConfigError:
    return ConfigError(f"model.config: {file}: expected {expected}, found {described}: {change}")


def _name(file: Path) -> str:
    """The name of a run's folder begins with it, so it has no character that a path has not."""
    named = file.absolute().parent.name if file.stem == "config" else file.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "_", named).strip("._")[:40].lower() or "config"
