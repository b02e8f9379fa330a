"""What all models have in common: embedding, layers, norm, head; tokens and targets in, loss out.

Called through `__call__` by every engine, so that the hooks of a sharding wrapper see the root, and
the root's own parameters (embedding, last norm, head) are read inside its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from bench.models.initial_values import InitialValues
from bench.spec import ModelShape, Recompute

LEFT_OUT = -100

Contexts = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]
"""Makes what a forward pass runs under, and what the same runs under when it is recomputed."""


def recomputed(
    function: Callable[..., Tensor], *inputs: Tensor, contexts: Contexts = noop_context_fn
) -> Tensor:
    """`function` of `inputs`, of which only these are kept for the backward pass.

    The models have no dropout, so there is no random state to replay. Everything is recomputed: a
    layer of Transformer Engine that is left early keeps the scales of the forward pass.
    """
    out: Tensor = checkpoint(
        function,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=contexts,
        early_stop=contexts is noop_context_fn,
    )
    return out


class Recomputable(nn.Module):
    """A layer that recomputes all of itself if `recompute` is full.

    The checkpoint sits inside the layer: a wrapper's hooks then see one forward per microbatch, and
    the recomputation runs after its pre-backward hook has gathered weights.
    """

    def __init__(self, recompute: Recompute) -> None:
        super().__init__()
        self._recompute_all = recompute == "full"
        self.contexts: Contexts = noop_context_fn

    def run(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`function`, the layer's own, of `inputs`."""
        if self._recompute_all and torch.is_grad_enabled():
            return recomputed(function, *inputs, contexts=self.contexts)
        return function(*inputs)


class Decoder(nn.Module):
    """A stack of `layers` between an embedding and a head.

    Parameters are FP32 as built; engines cast, wrap or shard them. A subclass says what a layer is
    called with. unit_classes: the modules that sharding engines gather and release as one.
    precision: what a forward pass runs under (`bench.models.low_precision`). initial_values: the
    rule of its parameters' values. loss_chunks: parts of the tokens whose logits exist one at a
    time; above 1, the backward pass computes each part again.
    """

    unit_classes: ClassVar[tuple[type[nn.Module], ...]] = ()

    def __init__(self, shape: ModelShape, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.initial_values: InitialValues | None = None
        self.precision: Callable[[], AbstractContextManager[object]] = nullcontext
        self.loss_chunks = 1
        self.tie()

    @property
    def residual_writes(self) -> int:
        """How many projections write to the residual stream, for the scale of initial values."""
        return len(self.layers)

    def tie(self) -> None:
        """Make embedding and head one parameter again, where the shape says so.

        Needed after anything that replaces parameters one by one (`to_empty` from meta).
        """
        if self.shape.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """int64 [batch, seq_len] twice to the mean cross-entropy, a scalar in FP32 or wider."""
        return self.loss(self.stream(tokens), targets)

    def logits(self, tokens: Tensor) -> Tensor:
        """int64 [batch, seq_len] to [batch, seq_len, vocab] in the compute dtype."""
        out: Tensor = self.head(self.norm(self.stream(tokens)))
        return out

    def stream(self, tokens: Tensor) -> Tensor:
        """int64 [batch, seq_len] to [batch, seq_len, hidden], before the last norm."""
        with self.precision():
            return self.run_layers(self.embedding(tokens))

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """[batch, seq_len, hidden] and targets to their mean cross-entropy.

        Targets below 0 are left out.
        """
        if self.loss_chunks == 1:
            return self._loss(x, targets, "mean")
        rows, flat = x.flatten(0, 1), targets.flatten()
        parts = zip(rows.chunk(self.loss_chunks), flat.chunk(self.loss_chunks), strict=True)
        sums = [recomputed(partial(self._loss, reduction="sum"), *part) for part in parts]
        return torch.stack(sums).sum() / (flat != LEFT_OUT).sum()

    def _loss(self, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        flat = wide.flatten(0, -2), targets.flatten()
        return F.cross_entropy(*flat, ignore_index=LEFT_OUT, reduction=reduction)

    def run_layers(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] through all layers."""
        for layer in self.layers:
            x = layer(x)
        return x


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape; the mean is accumulated in FP32 or wider."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class GroupedRMSNorm(nn.Module):
    """RMSNorm within each of `groups` equal groups of channels, with one weight per channel."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups = groups
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape."""
        grouped = x.unflatten(-1, (self.groups, -1))
        normed = F.rms_norm(grouped, grouped.shape[-1:], None, self.eps)
        out: Tensor = normed.flatten(-2) * self.weight
        return out
