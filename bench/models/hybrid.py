"""Decoder of several kinds of blocks in the order of a pattern: units that differ in size.

Every block is a norm, one mixer and a residual, as in Nemotron-H (arXiv:2504.03624). Attention has
no rotary embedding: the state-space blocks mark the order of tokens. Behind a `/` follow the blocks
of one depth of multi-token prediction, as in DeepSeek-V3 (arXiv:2412.19437, section 2.2): they get
the stream of the depth before and the embedding of the next token, and predict the token
after that, by the same embedding, last norm and head.
"""

from __future__ import annotations

import itertools
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.models.decoder import LEFT_OUT, Decoder
from bench.models.experts import Experts, SquaredReLU
from bench.models.llama import Attention
from bench.models.norm import RMSNorm
from bench.models.state_space import Mamba
from bench.spec import PREDICTION, HybridShape, ModelShape, Recompute


class HybridBlock(nn.Module):
    """The unit of sharding and of recompute; a subclass says what `mix` is."""

    def __init__(self, shape: ModelShape, recompute: Recompute) -> None:
        super().__init__()
        self.recompute_all = recompute == "full"
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same shape."""
        # Inside the block, so that a wrapper's hooks see one forward per microbatch.
        if self.recompute_all and torch.is_grad_enabled():
            recomputed: Tensor = checkpoint(
                self._block, x, use_reentrant=False, preserve_rng_state=False
            )
            return recomputed
        return self._block(x)

    def mix(self, x: Tensor) -> Tensor:
        """What the block adds to the residual stream, from its normed input."""
        raise NotImplementedError

    def _block(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))


class MambaBlock(HybridBlock):
    """`M`: state space."""

    def __init__(self, shape: ModelShape, hybrid: HybridShape, recompute: Recompute) -> None:
        super().__init__(shape, recompute)
        self.mamba = Mamba(shape.hidden, hybrid, shape.norm_eps)

    def mix(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same shape."""
        out: Tensor = self.mamba(x)
        return out


class AttentionBlock(HybridBlock):
    """`*`: causal attention."""

    def __init__(self, shape: ModelShape, _hybrid: HybridShape, recompute: Recompute) -> None:
        super().__init__(shape, recompute)
        self.attention = Attention(shape, recompute_core=recompute == "selective")

    def mix(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same shape."""
        out: Tensor = self.attention(x, None)
        return out


class ExpertsBlock(HybridBlock):
    """`E`: mixture of experts."""

    def __init__(self, shape: ModelShape, hybrid: HybridShape, recompute: Recompute) -> None:
        super().__init__(shape, recompute)
        self.experts = Experts(shape.hidden, hybrid)

    def mix(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same shape."""
        out: Tensor = self.experts(x)
        return out


class FeedForwardBlock(HybridBlock):
    """`-`: feed-forward for every token."""

    def __init__(self, shape: ModelShape, _hybrid: HybridShape, recompute: Recompute) -> None:
        super().__init__(shape, recompute)
        self.feed_forward = SquaredReLU(shape.hidden, shape.ffn_hidden)

    def mix(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same shape."""
        out: Tensor = self.feed_forward(x)
        return out


class PredictionBlock(HybridBlock):
    """`/`: what a depth of multi-token prediction begins with."""

    def __init__(self, shape: ModelShape, _hybrid: HybridShape, recompute: Recompute) -> None:
        super().__init__(shape, recompute)
        self.embedded_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.join = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:  # type: ignore[override]
        """The stream and embedded tokens, both [batch, seq_len, hidden], to the next stream."""
        out: Tensor = self.join(torch.cat((self.norm(x), self.embedded_norm(embedded)), -1))
        return out


_BLOCKS = {
    "M": MambaBlock,
    "*": AttentionBlock,
    "E": ExpertsBlock,
    "-": FeedForwardBlock,
    PREDICTION: PredictionBlock,
}
#: Of the losses of all depths together, as Megatron-LM's default `mtp_loss_scaling_factor`.
_PREDICTION_SHARE = 0.1


class Hybrid(Decoder):
    """Decoder of the blocks that `shape.hybrid.pattern` spells."""

    unit_classes: ClassVar[tuple[type[nn.Module], ...]] = (HybridBlock,)

    def __init__(self, shape: ModelShape, recompute: Recompute = "none") -> None:
        hybrid = shape.hybrid
        if hybrid is None:
            raise ValueError(f"{shape.preset} is no hybrid: its shape has no pattern")
        super().__init__(
            shape, (_BLOCKS[letter](shape, hybrid, recompute) for letter in hybrid.pattern)
        )
        begins = [place for place, letter in enumerate(hybrid.pattern) if letter == PREDICTION]
        ends = [*begins, len(hybrid.pattern)]
        self._trunk, *self._depths = itertools.starmap(slice, itertools.pairwise([0, *ends]))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As `Decoder.forward`; every depth adds its share of the loss."""
        x = self.stream(tokens)
        loss = self.loss(x, targets)
        for ahead, depth in enumerate(self._depths):
            with self.precision():
                join, *layers = self.layers[depth]
                x = join(x, self.embedding(_later(targets, ahead, 0)))
                for layer in layers:
                    x = layer(x)
            share = _PREDICTION_SHARE / len(self._depths)
            loss = loss + share * self.loss(x, _later(targets, ahead + 1, LEFT_OUT))
        return loss

    def run_layers(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] through the layers before the first depth."""
        for layer in self.layers[self._trunk]:
            x = layer(x)
        return x


def _later(targets: Tensor, ahead: int, rest: int) -> Tensor:
    """[batch, seq_len]: the targets so many positions ahead, and `rest` where there are none."""
    return F.pad(targets[:, ahead:], (0, ahead), value=rest)
