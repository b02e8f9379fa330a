"""Small models, each with one property that a sharded implementation easily gets wrong.

They take int64 tokens, [batch, positions], or `features`, [batch, WIDTH]. With targets they return
the mean loss, as the models of `bench.models` do, and without them the outputs of the head. Few of
their sizes divide by 2 or 4. Weights depend on the seed alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.testing.units import WIDTH, Block, run_units

VOCABULARY = 11
CLASSES = 3


class Stack(nn.Module):
    """Embedding and head belong to the root, three blocks are units."""

    def __init__(self, *blocks: nn.Module, path: str = "", features: bool = False) -> None:
        """path: what blocks do, as `run_units` takes it; all run without one.

        features: no embedding, and a head with a bias that gives `CLASSES` outputs.
        """
        super().__init__()
        self.embedding = nn.Identity() if features else nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks or (Block(), Block(), Block()))
        self.path = path or "r" * len(self.blocks)
        self.unit_classes = tuple(dict.fromkeys(map(type, self.blocks)))
        outputs = CLASSES if features else VOCABULARY
        self.head = nn.Linear(WIDTH, outputs, bias=features)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Outputs of the head, or the mean cross-entropy of `targets`."""
        x = self.hidden(self.embedding(inputs))
        if targets is not None:
            return self.loss(x, targets)
        out: Tensor = self.head(x)
        return out

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the head on `x`, in FP32 or wider."""
        logits = self.head(x)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten())

    def hidden(self, x: Tensor) -> Tensor:
        """What lies between embedding and head."""
        return run_units(self.blocks, self.path, x)


class Tied(Stack):
    """Embedding and head are one parameter, read first and last."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.head.weight = self.embedding.get_parameter("weight")


class Frozen(Stack):
    """One frozen parameter in a unit that is trained, and one unit frozen whole."""

    def __init__(self, *, features: bool = False) -> None:
        mixed, last = Block(), Block()
        super().__init__(Block(), mixed, last, features=features)
        mixed.up.weight.requires_grad_(False)
        last.requires_grad_(False)


class Reader(nn.Module):
    """Reads its child's weight without calling the child, as fused kernels do."""

    reads = ("inner.weight", "inner.bias")

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[..., WIDTH] to the same."""
        return x + F.linear(x, self.inner.weight, self.inner.bias).tanh()


class Rooted(Stack):
    """The root has a parameter of its own, and a child whose weight is read raw."""

    def __init__(self, *, features: bool = False) -> None:
        super().__init__(Block(), Block(), features=features)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.reader = Reader()

    def hidden(self, x: Tensor) -> Tensor:
        """Blocks around the reader, scaled twice by the root's own parameter."""
        x = self.blocks[0](x * self.scale)
        out: Tensor = self.blocks[1](self.reader(x)) * self.scale
        return out


class Twice(Stack):
    """One unit runs twice in a forward pass, with another between."""

    def __init__(self, *, features: bool = False) -> None:
        super().__init__(Block(), Block(), features=features)

    def hidden(self, x: Tensor) -> Tensor:
        """First, second, first."""
        first, second = self.blocks
        out: Tensor = first(second(first(x)))
        return out


class Recomputed(Stack):
    """Activations are recomputed in the backward pass, in each of torch's two ways."""

    def __init__(self, *, features: bool = False) -> None:
        super().__init__(*(Block() for _ in range(4)), path="ckck", features=features)


class Unused(Stack):
    """A unit holds a layer that takes no part in the forward pass."""

    def __init__(self, *, features: bool = False) -> None:
        super().__init__(features=features)
        self.blocks[0].spare = nn.Linear(WIDTH, 4)


def build(
    model: Callable[[], nn.Module], dtype: torch.dtype, seed: int, deviation: float
) -> nn.Module:
    """The model with weights drawn in FP64 from `seed`, rounded to `dtype`: equal on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = model()
    generator = torch.Generator().manual_seed(seed)
    made.to(dtype=dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * deviation)
    return made


def generator_of(rank: int, microbatch: int, step: int) -> torch.Generator:
    """Draws the inputs of a microbatch: different for every rank, microbatch and step."""
    return torch.Generator().manual_seed(1_000_003 * step + 1_009 * rank + microbatch + 1)
