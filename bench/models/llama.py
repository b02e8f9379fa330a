"""A Llama-style decoder; `TransformerLayer` is the unit that sharding engines gather as one."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models.decoder import Decoder, Recomputable, RMSNorm, recomputed
from bench.spec import ModelShape, Recompute, RopeScaling


class RotaryTables(NamedTuple):
    """Cosines and sines, each FP32 of shape [seq_len, head_dim], both halves equal."""

    cos: Tensor
    sin: Tensor


class RotaryCache:
    """Tables of the latest (length, device); one model runs one sequence length at a time.

    They are no module buffers on purpose: a buffer would be rounded by `module.to(bfloat16)`, which
    costs position accuracy, and would have to be moved, saved and sharded. They are always FP32.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        if head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, found {head_dim}")
        self._head_dim = head_dim
        self._theta = theta
        self._scaling = scaling
        self._key: tuple[int, torch.device] | None = None
        self._tables: RotaryTables | None = None

    def tables(self, seq_len: int, device: torch.device) -> RotaryTables:
        """Tables for positions 0..seq_len-1 on `device`, computed at the first call only."""
        key = (seq_len, device)
        if self._tables is None or self._key != key:
            self._tables = self._compute(seq_len, device)
            self._key = key
        return self._tables

    def _compute(self, seq_len: int, device: torch.device) -> RotaryTables:
        # Angles in FP64 on the CPU: every device and every rank gets the same rounded table.
        exponents = torch.arange(0, self._head_dim, 2, dtype=torch.float64) / self._head_dim
        frequencies = stretched(self._theta**-exponents, self._scaling)
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
        both = torch.cat((angles, angles), dim=-1)
        return RotaryTables(both.cos().float().to(device), both.sin().float().to(device))


def stretched(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Rotary frequencies (radians per position) for longer contexts; see `RopeScaling`.

    The rule of Llama 3.1: Grattafiori et al. 2024 (arXiv:2407.21783) raise theta for long contexts;
    the three ranges of wavelengths are those of the released models' `rope_scaling`.
    """
    if scaling is None:
        return frequencies
    divided = frequencies / scaling.factor
    if scaling.kind == "linear":
        return divided
    turns_in_original = scaling.original_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns_in_original - low) / (high - low)).clamp(0, 1)
    return divided + kept * (frequencies - divided)


def apply_rotary(x: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate `x` [batch, heads, seq_len, head_dim] in FP32 or wider; same dtype as x out.

    In rotate-half form (Su et al. 2021, arXiv:2104.09864).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * tables.cos + turned * tables.sin).to(x.dtype)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[batch, heads, seq_len, head_dim]; `key` and `value` may have fewer heads (a divisor)."""
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads (arXiv:2305.13245)."""

    def __init__(self, shape: ModelShape, *, recompute_core: bool) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.recompute_core = recompute_core
        query_size = shape.heads * shape.head_dim
        kv_size = shape.kv_heads * shape.head_dim
        self.query = nn.Linear(shape.hidden, query_size, bias=shape.qkv_bias)
        self.key = nn.Linear(shape.hidden, kv_size, bias=shape.qkv_bias)
        self.value = nn.Linear(shape.hidden, kv_size, bias=shape.qkv_bias)
        self.output = nn.Linear(query_size, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTables | None = None) -> Tensor:
        """[batch, seq_len, hidden] to the same shape; without tables positions are not marked."""
        query, key = self._heads(self.query(x)), self._heads(self.key(x))
        if rotary is not None:
            query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)
        value = self._heads(self.value(x))
        if self.recompute_core:
            mixed = recomputed(_causal_attention, query, key, value)
        else:
            mixed = _causal_attention(query, key, value)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x)); no bias."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn_hidden, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn_hidden, bias=False)
        self.down = nn.Linear(shape.ffn_hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same shape."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class TransformerLayer(Recomputable):
    """Pre-norm attention and feed-forward with residuals: the unit of sharding and of recompute."""

    def __init__(self, shape: ModelShape, recompute: Recompute) -> None:
        super().__init__(recompute)
        self.attention_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.attention = Attention(shape, recompute_core=recompute == "selective")
        self.feed_forward_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same shape; `cos` and `sin` are [seq_len, head_dim]."""
        return self.run(self._layer, x, cos, sin)

    def _layer(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), RotaryTables(cos, sin))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Llama(Decoder):
    """Decoder of transformer layers."""

    unit_classes: ClassVar[tuple[type[nn.Module], ...]] = (TransformerLayer,)

    def __init__(self, shape: ModelShape, recompute: Recompute = "none") -> None:
        super().__init__(shape, (TransformerLayer(shape, recompute) for _ in range(shape.layers)))
        self._rotary = RotaryCache(shape.head_dim, shape.rope_theta, shape.rope_scaling)

    @property
    def residual_writes(self) -> int:
        """Attention and feed-forward of every layer."""
        return 2 * len(self.layers)

    def run_layers(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] through all layers."""
        cos, sin = self._rotary.tables(x.shape[1], x.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x
