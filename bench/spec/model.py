"""The model of a run: as asked for, and as an architecture with nothing left open."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Final, Literal

from pydantic import Field

from bench.spec.names import Frozen, LinearName, Recompute

_Layer = list[tuple[str, tuple[int, ...]]]


class ModelSpec(Frozen):
    """A preset of `bench.resolve.presets`, with single fields replaced where they are not null."""

    preset: str = "debug"
    """The model that the other fields change."""
    layers: int | None = Field(default=None, ge=1)
    """Blocks."""
    hidden: int | None = Field(default=None, ge=1)
    """Width between blocks."""
    ffn_hidden: int | None = Field(default=None, ge=1)
    """Width of feed-forward blocks."""
    heads: int | None = Field(default=None, ge=1)
    """Heads of attention."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Heads of keys and values."""
    vocab: int | None = Field(default=None, ge=2)
    """Tokens that there are."""
    tie_embeddings: bool | None = None
    """One matrix for embedding and head."""
    pattern: str | None = Field(default=None, max_length=1000)
    """One letter per block of a hybrid: M Mamba-2, * attention, E experts, - feed-forward."""
    experts: int | None = Field(default=None, ge=1)
    """Routed experts of a block of a hybrid."""
    experts_per_token: int | None = Field(default=None, ge=1)
    """Experts that a token visits."""
    recompute: Recompute = "none"
    """Activations that the backward pass computes again."""
    linear: LinearName = "torch"
    """What computes the projections of a Llama."""
    linear_recipe: str | None = None
    """How that package scales FP8, under its own name; null is its default."""
    quantised_weights: bool = False
    """Weights are kept, or gathered, as its codes."""
    config: str | None = None
    """Path of a Hugging Face config.json of the Llama family, instead of a preset."""
    factory: str | None = None
    """package.module:build of a model of your own; runs code of that module in the ranks."""


class LinearLayers(Frozen):
    """What computes the projections of a Llama's layers.

    kind: torch, or a package whose layers multiply FP8. recipe: how it scales, under its own name.
    quantised_weights: weights are kept, or gathered, as its codes.
    """

    kind: LinearName = "torch"
    recipe: str = ""
    quantised_weights: bool = False


class RopeScaling(Frozen):
    """How rotary frequencies are stretched for positions beyond those of the first training.

    kind: `linear` divides all of them by `factor`; `llama3` leaves those whose wavelength is below
    original_positions / high_freq_factor as they are, divides those above original_positions /
    low_freq_factor, and goes from one to the other in between.
    """

    kind: Literal["linear", "llama3"]
    factor: float = Field(gt=0)
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = Field(default=8192, ge=1)


class HybridShape(Frozen):
    """What a hybrid of block kinds has besides the numbers of `ModelShape`; counts in elements.

    pattern: one letter of `BLOCK_LETTERS` per block (attention is without rotary embedding).
    mamba_groups: groups of heads that share B and C. state: size of the state per channel. chunk:
    tokens that the scan takes at once. expert_hidden, shared_expert_hidden: widths of a routed
    expert and of the one that every token visits (0: none). routed_scale: factor on the output of
    the routed experts.
    """

    pattern: str
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    state: int
    conv_kernel: int = 4
    chunk: int = 128
    experts: int
    experts_per_token: int
    expert_hidden: int
    shared_expert_hidden: int
    routed_scale: float = 1.0

    @property
    def mamba_inner(self) -> int:
        """Channels inside a Mamba block."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def mamba_convolved(self) -> int:
        """Channels that pass the convolution: the inner ones, B and C."""
        return self.mamba_inner + 2 * self.mamba_groups * self.state


#: The dim of each matrix of a Llama that tensor parallelism cuts. Outputs of the first four are
#: parts of heads, channels and vocabulary; the last two and the embedding give partial sums.
TENSOR_PARALLEL_DIMS: Final = {
    "attention.query": 0,
    "attention.key": 0,
    "attention.value": 0,
    "feed_forward.gate": 0,
    "feed_forward.up": 0,
    "attention.output": 1,
    "feed_forward.down": 1,
    "embedding": 0,
    "head": 0,
}


class ModelShape(Frozen):
    """A decoder's architecture; every count in elements, not bytes.

    A Llama where `hybrid` is None, with biases of query, key and value where `qkv_bias`. In a
    hybrid, `layers` is the number of blocks and `ffn_hidden` the width of its `-` blocks, and
    feed-forward and experts are not gated.
    """

    preset: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tie_embeddings: bool
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    hybrid: HybridShape | None = None
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False

    @property
    def parameters(self) -> int:
        """Number of distinct parameters (a tied embedding counts once)."""
        return sum(prod(size) for _, _, size in self.tensors())

    def tensors(self) -> Iterator[tuple[tuple[str, ...], str, tuple[int, ...]]]:
        """Names, unit and shape of every parameter, in registration order.

        Those of `bench.models.build.empty_model`. The layers are the units; "" is the root.
        """
        matrix = (self.vocab, self.hidden)
        tied = ("head.weight",) if self.tie_embeddings else ()
        yield ("embedding.weight", *tied), "", matrix
        for index, layer in enumerate(_layers(self)):
            unit = f"layers.{index}"
            yield from (((f"{unit}.{name}",), unit, size) for name, size in layer)
        yield ("norm.weight",), "", (self.hidden,)
        if not tied:
            yield ("head.weight",), "", matrix

    @property
    def attention_weights(self) -> int:
        """Elements of the four projections of one attention."""
        query = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        return self.hidden * (query + 2 * kv) + query * self.hidden


def _layers(shape: ModelShape) -> list[_Layer]:
    if shape.hybrid is None:
        return [_llama_layer(shape)] * shape.layers
    norm: _Layer = [("norm.weight", (shape.hidden,))]
    mixers = {
        "M": _mamba(shape.hidden, shape.hybrid),
        "*": _attention(shape),
        "E": _experts(shape.hidden, shape.hybrid),
        "-": _feed_forward("feed_forward", shape.hidden, shape.ffn_hidden),
        "/": [
            ("embedded_norm.weight", (shape.hidden,)),
            ("join.weight", (shape.hidden, 2 * shape.hidden)),
        ],
    }
    return [norm + mixers[letter] for letter in shape.hybrid.pattern]


def _llama_layer(shape: ModelShape) -> _Layer:
    hidden, ffn = shape.hidden, shape.ffn_hidden
    return [
        ("attention_norm.weight", (hidden,)),
        *_attention(shape),
        ("feed_forward_norm.weight", (hidden,)),
        ("feed_forward.gate.weight", (ffn, hidden)),
        *_feed_forward("feed_forward", hidden, ffn),
    ]


def _attention(shape: ModelShape) -> _Layer:
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: _Layer = []
    for name, size in (("query", query), ("key", kv), ("value", kv)):
        found.append((f"attention.{name}.weight", (size, shape.hidden)))
        found += [(f"attention.{name}.bias", (size,))] if shape.qkv_bias else []
    return [*found, ("attention.output.weight", (shape.hidden, query))]


def _feed_forward(name: str, hidden: int, width: int) -> _Layer:
    return [(f"{name}.up.weight", (width, hidden)), (f"{name}.down.weight", (hidden, width))]


def _mamba(hidden: int, hybrid: HybridShape) -> _Layer:
    inner, convolved, heads = hybrid.mamba_inner, hybrid.mamba_convolved, hybrid.mamba_heads
    return [
        ("mamba.conv_weight", (convolved, 1, hybrid.conv_kernel)),
        ("mamba.conv_bias", (convolved,)),
        ("mamba.log_decay", (heads,)),
        ("mamba.step_bias", (heads,)),
        ("mamba.skip", (heads,)),
        ("mamba.input.weight", (inner + convolved + heads, hidden)),
        ("mamba.norm.weight", (inner,)),
        ("mamba.output.weight", (hidden, inner)),
    ]


def _experts(hidden: int, hybrid: HybridShape) -> _Layer:
    width = hybrid.shared_expert_hidden
    return [
        ("experts.up", (hybrid.experts * hybrid.expert_hidden, hidden)),
        ("experts.down", (hybrid.experts * hidden, hybrid.expert_hidden)),
        ("experts.router.weight", (hybrid.experts, hidden)),
        *(_feed_forward("experts.shared", hidden, width) if width else []),
    ]
