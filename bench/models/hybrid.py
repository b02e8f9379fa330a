"""Decoder of several kinds of blocks in the order of a pattern: units that differ in size.

Every block is a norm, one mixer and a residual, as in Nemotron-H (arXiv:2504.03624). Attention has
no rotary embedding: the state-space blocks mark the order of tokens. Behind a `/` follow the blocks
of one depth of multi-token prediction, as in DeepSeek-V3 (arXiv:2412.19437, section 2.2): they get
the stream of the depth before and the embedding of the next token, and predict the token
after that, by the same embedding, last norm and head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models.decoder import LEFT_OUT, Decoder, Recomputable, RMSNorm
from bench.models.experts import Experts, SquaredReLU
from bench.models.llama import Attention
from bench.models.state_space import Mamba
from bench.spec import PREDICTION, HybridShape, ModelShape, Recompute

_Make = Callable[[ModelShape, HybridShape, Recompute], nn.Module]
#: What a block adds to the residual stream, by its letter: the name of the module, and the module.
_MIXERS: Final[Mapping[str, tuple[str, _Make]]] = {
    "M": ("mamba", lambda shape, hybrid, _: Mamba(shape.hidden, hybrid, shape.norm_eps)),
    "*": (
        "attention",
        lambda shape, _, recompute: Attention(shape, recompute_core=recompute == "selective"),
    ),
    "E": ("experts", lambda shape, hybrid, _: Experts(shape.hidden, hybrid)),
    "-": ("feed_forward", lambda shape, *_: SquaredReLU(shape.hidden, shape.ffn_hidden)),
}


class HybridBlock(Recomputable):
    """A norm, a mixer and a residual: the unit of sharding and of recompute.

    mixer: of `_MIXERS`, the name of the module that mixes the normed stream.
    """

    mixer: str = ""

    def __init__(self, shape: ModelShape, letter: str, recompute: Recompute) -> None:
        super().__init__(recompute)
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        if letter in _MIXERS and shape.hybrid is not None:
            self.mixer, made = _MIXERS[letter]
            self.add_module(self.mixer, made(shape, shape.hybrid, recompute))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same shape."""
        return self.run(self._block, x)

    def _block(self, x: Tensor) -> Tensor:
        out: Tensor = x + getattr(self, self.mixer)(self.norm(x))
        return out


class PredictionBlock(HybridBlock):
    """`/`: what a depth of multi-token prediction begins with."""

    def __init__(self, shape: ModelShape, letter: str, recompute: Recompute) -> None:
        super().__init__(shape, letter, recompute)
        self.embedded_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.join = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:  # type: ignore[override]
        """The stream and embedded tokens, both [batch, seq_len, hidden], to the next stream."""
        out: Tensor = self.join(torch.cat((self.norm(x), self.embedded_norm(embedded)), -1))
        return out


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
            shape,
            (
                (PredictionBlock if letter == PREDICTION else HybridBlock)(shape, letter, recompute)
                for letter in hybrid.pattern
            ),
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
