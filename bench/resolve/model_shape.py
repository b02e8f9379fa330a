"""`ModelSpec` to `ModelShape`: the preset, with single fields replaced, checked for sense."""

from __future__ import annotations

import difflib

from bench.errors import ConfigError
from bench.resolve.hugging_face import read_config
from bench.resolve.presets import PRESETS
from bench.spec import BLOCK_LETTERS, PREDICTION, HybridShape, ModelShape, ModelSpec, is_import_path

_REPLACEABLE_IN_HYBRIDS = ("pattern", "experts", "experts_per_token")
_REPLACEABLE = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "tie_embeddings")


def resolve_shape(model: ModelSpec) -> ModelShape | None:
    """The architecture that `model` means; None for a model of the user's own.

    A preset, or a configuration, keeps its head dimension until `hidden` or `heads` is replaced;
    then it is hidden / heads.

    Raises:
        ConfigError: unknown preset, more than one model, a configuration that is no Llama's,
            numbers of heads that do not fit, or, in a hybrid, a pattern or experts that mean
            nothing.
    """
    _refuse_two_models(model)
    if model.factory is not None:
        return None
    preset = _preset(model.preset) if model.config is None else read_config(model.config)
    changes = {
        name: getattr(model, name) for name in _REPLACEABLE if getattr(model, name) is not None
    }
    if preset.hybrid is None:
        _refuse_hybrid_fields(model)
        shape = preset.model_copy(update=changes)
    else:
        hybrid = _resolve_hybrid(model, preset.hybrid)
        shape = preset.model_copy(
            update=changes | {"hybrid": hybrid, "layers": len(hybrid.pattern)}
        )
    if model.hidden is not None or model.heads is not None:
        shape = shape.model_copy(update={"head_dim": _head_dim(shape)})
    if shape.heads % shape.kv_heads:
        raise ConfigError(
            f"model: {shape.heads} heads cannot share {shape.kv_heads} kv_heads evenly; choose"
            f" kv_heads out of {_divisors(shape.heads)}"
        )
    return shape


def _refuse_two_models(model: ModelSpec) -> None:
    """A preset, a configuration and a factory exclude each other."""
    named = [name for name in ("config", "factory") if getattr(model, name) is not None]
    named += ["preset"] if model.preset != ModelSpec().preset else []
    if len(named) > 1:
        raise ConfigError(
            f"model.{named[0]}: {' and '.join(named)} each name a model; keep one of them"
        )
    if model.factory is None:
        return
    if not is_import_path(model.factory):
        raise ConfigError(
            f"model.factory: expected package.module:function, found {model.factory!r}"
        )
    numbers = (*_REPLACEABLE, *_REPLACEABLE_IN_HYBRIDS)
    changed = [name for name in numbers if getattr(model, name) is not None]
    changed += ["loss_chunks"] if model.loss_chunks > 1 else []
    if changed:
        raise ConfigError(
            f"model.{changed[0]}: model.factory decides what its model is like; leave"
            f" {', '.join(changed)} out"
        )


def _refuse_hybrid_fields(model: ModelSpec) -> None:
    named = [name for name in _REPLACEABLE_IN_HYBRIDS if getattr(model, name) is not None]
    if named:
        hybrids = [name for name, shape in PRESETS.items() if shape.hybrid is not None]
        raise ConfigError(
            f"model.{named[0]}: {model.preset} is a Llama, whose layers are all alike; choose a"
            f" hybrid preset ({', '.join(hybrids)}), or leave the field out"
        )


def _resolve_hybrid(model: ModelSpec, preset: HybridShape) -> HybridShape:
    """The hybrid part with single fields replaced."""
    changes = {
        name: getattr(model, name)
        for name in _REPLACEABLE_IN_HYBRIDS
        if getattr(model, name) is not None
    }
    hybrid = preset.model_copy(update=changes)
    if model.layers is not None and model.layers != len(hybrid.pattern):
        raise ConfigError(
            f"model.layers: {model.layers} blocks do not fit the pattern {hybrid.pattern!r}, which"
            f" spells {len(hybrid.pattern)}; leave layers out, or set model.pattern"
        )
    unknown = sorted(set(hybrid.pattern) - set(BLOCK_LETTERS))
    if unknown or not hybrid.pattern:
        described = f"found {', '.join(map(repr, unknown))}" if unknown else "found no block at all"
        spelled = ", ".join(f"{letter} {what}" for letter, what in BLOCK_LETTERS.items())
        raise ConfigError(
            f"model.pattern: expected one letter per block out of {spelled}; {described}"
        )
    if not all(hybrid.pattern.split(PREDICTION)):
        raise ConfigError(
            f"model.pattern: {hybrid.pattern!r} has no block before or behind a {PREDICTION!r},"
            " which begins a depth of multi-token prediction: spell its blocks"
        )
    if hybrid.experts_per_token > hybrid.experts:
        raise ConfigError(
            f"model.experts_per_token: a token cannot visit {hybrid.experts_per_token} of"
            f" {hybrid.experts} experts; choose at most {hybrid.experts}"
        )
    return hybrid


def _preset(name: str) -> ModelShape:
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"model.preset: unknown preset {name!r}; expected one of {', '.join(PRESETS)}{hint}"
    )


def _head_dim(shape: ModelShape) -> int:
    head_dim, rest = divmod(shape.hidden, shape.heads)
    if rest:
        lower = shape.hidden - rest
        near = [size for size in (lower, lower + shape.heads) if size > 0]
        raise ConfigError(
            f"model: hidden {shape.hidden} is not divisible by heads {shape.heads}; choose heads"
            f" out of {_divisors(shape.hidden)}, or hidden {' or '.join(map(str, near))}"
        )
    if head_dim % 2:
        raise ConfigError(
            f"model: hidden {shape.hidden} over {shape.heads} heads gives a head dimension of"
            f" {head_dim}; rotary embeddings turn pairs, so it must be even: change hidden or heads"
        )
    return head_dim


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
