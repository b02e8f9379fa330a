"""A Llama-style decoder as one module: tokens and targets in, mean cross-entropy out.

Called through `__call__` by every engine, so that the hooks of a sharding wrapper see the root, and
the root's own parameters (embedding, last norm, head) are read inside its forward.
`TransformerLayer` is the unit that sharding engines gather and release as one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.models.initialisation import initialise
from bench.models.rotary import RotaryCache, RotaryTables, apply_rotary
from bench.spec import ModelShape, Recompute


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape; the mean is accumulated in FP32 or wider."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[batch, heads, seq_len, head_dim]; `key` and `value` may have fewer heads (a divisor)."""
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads (arXiv:2305.13245); no bias."""

    def __init__(self, shape: ModelShape, *, recompute_core: bool) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.recompute_core = recompute_core
        query_size = shape.heads * shape.head_dim
        kv_size = shape.kv_heads * shape.head_dim
        self.query = nn.Linear(shape.hidden, query_size, bias=False)
        self.key = nn.Linear(shape.hidden, kv_size, bias=False)
        self.value = nn.Linear(shape.hidden, kv_size, bias=False)
        self.output = nn.Linear(query_size, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        """[batch, seq_len, hidden] to the same shape."""
        query = apply_rotary(self._heads(self.query(x)), rotary)
        key = apply_rotary(self._heads(self.key(x)), rotary)
        value = self._heads(self.value(x))
        if self.recompute_core:
            # No dropout in this model, so there is no random state to replay.
            mixed = checkpoint(
                _causal_attention, query, key, value, use_reentrant=False, preserve_rng_state=False
            )
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


class TransformerLayer(nn.Module):
    """Pre-norm attention and feed-forward with residuals: the unit of sharding and of recompute."""

    def __init__(self, shape: ModelShape, recompute: Recompute) -> None:
        super().__init__()
        self.recompute_all = recompute == "full"
        self.attention_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.attention = Attention(shape, recompute_core=recompute == "selective")
        self.feed_forward_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same shape; `cos` and `sin` are [seq_len, head_dim]."""
        # The checkpoint sits inside the layer: a wrapper's hooks then see one forward per
        # microbatch, and the recomputation runs after its pre-backward hook has gathered weights.
        if self.recompute_all and torch.is_grad_enabled():
            recomputed: Tensor = checkpoint(
                self._layer, x, cos, sin, use_reentrant=False, preserve_rng_state=False
            )
            return recomputed
        return self._layer(x, cos, sin)

    def _layer(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), RotaryTables(cos, sin))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Llama(nn.Module):
    """Decoder of `shape`. Parameters are FP32 as built; engines cast, wrap or shard them."""

    unit_classes = (TransformerLayer,)

    def __init__(self, shape: ModelShape, recompute: Recompute = "none") -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(TransformerLayer(shape, recompute) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self._rotary = RotaryCache(shape.head_dim, shape.rope_theta)
        self.tie()

    def tie(self) -> None:
        """Make embedding and head one parameter again, where the shape says so.

        Needed after anything that replaces parameters one by one (`to_empty` from meta).
        """
        if self.shape.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """int64 [batch, seq_len] twice to the mean cross-entropy, a scalar in FP32 or wider."""
        logits = self.logits(tokens)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten())

    def logits(self, tokens: Tensor) -> Tensor:
        """int64 [batch, seq_len] to [batch, seq_len, vocab] in the compute dtype."""
        cos, sin = self._rotary.tables(tokens.shape[1], tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.head(self.norm(x))
        return out


def build_llama(
    shape: ModelShape, *, recompute: Recompute, seed: int, device: torch.device
) -> Llama:
    """FP32 model on `device` whose values depend on `shape` and `seed` alone.

    Built without values first, so that no default initialisation is computed and thrown away, and
    so that a device model never has a second full copy in host memory.
    """
    with torch.device("meta"):
        model = Llama(shape, recompute)
    model.to_empty(device=device)
    model.tie()
    initialise(model, shape.layers, seed)
    return model
