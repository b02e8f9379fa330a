"""The model of a run: as requested, and as an architecture with nothing left open."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from bench.spec.names import Frozen, LinearName, Recompute


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
    loss_chunks: int = Field(default=1, ge=1)
    """Parts of a micro batch whose logits exist one at a time. Above 1, head and loss run twice."""
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
        matrix = self.vocab * self.hidden
        root = (1 if self.tie_embeddings else 2) * matrix + self.hidden
        biases = (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        attention, feed_forward = self.attention_weights + biases, self.hidden * self.ffn_hidden
        if self.hybrid is None:
            return root + self.layers * (2 * self.hidden + attention + 3 * feed_forward)
        blocks = {
            "M": _mamba(self.hidden, self.hybrid),
            "*": attention,
            "E": _experts(self.hidden, self.hybrid),
            "-": 2 * feed_forward,
            "/": self.hidden + 2 * self.hidden**2,
        }
        return root + sum(self.hidden + blocks[letter] for letter in self.hybrid.pattern)

    @property
    def attention_weights(self) -> int:
        """Elements of the four projections of one attention."""
        query = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        return self.hidden * (query + 2 * kv) + query * self.hidden


def _mamba(hidden: int, hybrid: HybridShape) -> int:
    inner, convolved, heads = hybrid.mamba_inner, hybrid.mamba_convolved, hybrid.mamba_heads
    convolution = convolved * (hybrid.conv_kernel + 1)
    # Decay, step and skip of each head; projections in and out; the norm.
    return convolution + 3 * heads + (2 * inner + convolved + heads) * hidden + inner


def _experts(hidden: int, hybrid: HybridShape) -> int:
    routed = hybrid.experts * hidden * (2 * hybrid.expert_hidden + 1)
    return routed + 2 * hidden * hybrid.shared_expert_hidden
