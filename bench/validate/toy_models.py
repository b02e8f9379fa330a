"""The models of cases: those of `bench.testing`, and more that validation alone needs.

All take int64 tokens and targets, [batch, positions], and return the mean loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from bench.spec.engine_table import TABLE
from bench.testing.toy_models import (
    VOCABULARY,
    Frozen,
    Recomputed,
    Rooted,
    Stack,
    Tied,
    Twice,
    Unused,
    build,
    generator_of,
)
from bench.testing.units import HIDDEN, WIDTH, Block, Unit

BATCH = 2
POSITIONS = 5
_DEVIATION = 0.4


class CrossTied(Stack):
    """Two units share one weight, so that neither may release it."""

    def __init__(self) -> None:
        first, second = Block(), Block()
        second.up.weight = first.up.weight
        super().__init__(first, second)


class WideRows(Unit):
    """Rows of 27, 72 and 64 elements in one unit: no common multiple below 1728."""

    def __init__(self) -> None:
        super().__init__(WIDTH, branched=False)
        self.layers = nn.ModuleList(nn.Linear(*size) for size in ((27, 8), (72, 4), (64, 5)))

    def body(self, x: Tensor) -> Tensor:
        """Both ends of what the layers give."""
        layers: Any = self.layers
        parts = [layer(F.pad(x, (0, layer.in_features - WIDTH), value=0.5)) for layer in layers]
        mixed = torch.cat(parts, dim=-1).tanh()
        return mixed[..., :WIDTH] + mixed[..., -WIDTH:]


class Rows(Stack):
    """Row sizes that share a unit badly."""

    def __init__(self) -> None:
        super().__init__(WideRows())


class Uneven(Stack):
    """Units of two kinds: a pool with slots for one kind has none for the other."""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), WideRows())


class Sporadic(Stack):
    """Two branches that depend on the data: on microbatch, rank and step.

    With two ranks and two microbatches, the first is taken by rank 0 in the first microbatch of
    steps 1 and 3, and by nobody in step 2; the second by one rank in the second of every step.
    """

    _first_tokens = ({0, 7}, {2, 8})

    def __init__(self) -> None:
        super().__init__(Block(branched=True), Block(branched=True))

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """As `Stack`."""
        first = int(inputs[0, 0])
        self.path = "".join("r" if first in taken else "p" for taken in self._first_tokens)
        return super().forward(inputs, targets)


class SparseGradient(Stack):
    """The embedding's gradient is a sparse tensor."""

    def __init__(self) -> None:
        super().__init__(Block())
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=True)


class Gained(Block):
    """A block with a parameter of shape ()."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor, branched: bool = True) -> Tensor:
        """Scaled."""
        return super().forward(x, branched) * (1 + self.gain)


class Scalar(Stack):
    """Two parameters of shape (), one of the root and one of a unit."""

    def __init__(self) -> None:
        super().__init__(Gained())
        self.temperature = nn.Parameter(torch.empty(()))

    def hidden(self, x: Tensor) -> Tensor:
        """Scaled before and after."""
        return super().hidden(x * (1 + self.temperature)) * (1 + self.temperature)


class Rowwise(nn.Module):
    """A weight that tensor parallelism may have cut along dim 1: reads the part that it holds.

    The gain is whole on every rank, and each computes a part of its gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(HIDDEN, WIDTH))
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.back = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., WIDTH] to the same."""
        held = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        gain: Tensor = self.gain
        if isinstance(gain, DTensor):
            share = (0.25, 0.75)[gain.device_mesh.get_local_rank()]
            gain = gain.to_local(grad_placements=[Partial()])
            gain = gain * share + (gain * (1 - share)).detach()
        out: Tensor = x + self.back(F.gelu(F.linear(x, held))) * (1 + gain)
        return out


class TensorParallel(Stack):
    """Every rank of a tensor-parallel group holds equal halves, so that one of them is a reference.

    `cut` makes it so: the whole weight is the half next to itself.
    """

    def __init__(self) -> None:
        super().__init__(Rowwise(), Rowwise())

    def cut(self, mesh: DeviceMesh) -> None:
        """Replace a weight by a DTensor of twice its columns, cut over `tp`; mark one as cut."""
        self.tensor_mesh = mesh
        first, second = (block for block in self.blocks if isinstance(block, Rowwise))
        full = torch.cat([first.weight.detach()] * mesh["tp"].size(), dim=1)
        first.weight = nn.Parameter(distribute_tensor(full, mesh["tp"], [Shard(1)]))
        second.weight._tensor_parallel_mode = "row"  # type: ignore[attr-defined]
        for block in (first, second):
            gain = distribute_tensor(block.gain.detach(), mesh["tp"], [Replicate()])
            block.gain = nn.Parameter(gain)


class Expert(Block):
    """A block whose ranks hold experts of their own."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]


class Experts(Stack):
    """One dense block, and one expert per rank of an expert-parallel group.

    All experts start equal and see the tokens of the whole group, as after an exchange of tokens,
    so that each of them is what a single expert on all data would be.
    """

    def __init__(self) -> None:
        super().__init__(Block(), Expert())

    def spread(self, mesh: DeviceMesh) -> None:
        """Say which ranks share an expert."""
        self.expert_mesh = mesh

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Dense loss of the first `BATCH` rows, plus the experts' of every `BATCH` rows."""
        if targets is None:
            raise TypeError("experts have a loss and no outputs")
        own = slice(0, BATCH)
        dense, expert = self.blocks
        x = dense(self.embedding(inputs[own]))
        loss = self.loss(x, targets[own])
        # What reaches the expert carries no gradient back: that would be the other ranks' dense
        # gradient, which an exchange of tokens would send home.
        one_hot = F.one_hot(inputs, VOCABULARY)[..., :WIDTH].to(x.dtype)
        for start in range(0, len(inputs), BATCH):
            rows = slice(start, start + BATCH)
            loss = loss + expert(one_hot[rows]).square().mean()
        return loss


@dataclass(frozen=True)
class ToyModel:
    """A model to check. not_for: engines that refuse it by design, each with the reason."""

    build: Callable[[], nn.Module]
    not_for: Mapping[str, str] = field(default_factory=dict)


_NO_MESHES = "the engine takes no model that was cut over meshes of its own"
_NOWHERE_ELSE = {row.name: _NO_MESHES for row in TABLE if "expert_parallel" not in row.parallel}
_DDP_ZERO = "examples.engines.ddp_zero:build"
_SIMPLE_FSDP = "examples.engines.simple_fsdp:build"
_UNUSED_BY_DDP = "DistributedDataParallel wants every parameter used unless it searches for them"
_UNUSED = dict.fromkeys(("ddp", _DDP_ZERO), _UNUSED_BY_DDP)
_DENSE_ADAM = dict.fromkeys(("single", "ddp", _DDP_ZERO), "torch's AdamW takes no sparse gradient")

TOY_MODELS: dict[str, ToyModel] = {
    "stack": ToyModel(Stack),
    "tied": ToyModel(
        Tied, {"megatron_fsdp_v2": "megatron_fsdp.experimental makes two weights of a tied one"}
    ),
    "cross_tied": ToyModel(
        CrossTied, {"megatron_fsdp_v2": "megatron_fsdp.experimental refuses it"}
    ),
    "frozen": ToyModel(Frozen),
    "rooted": ToyModel(Rooted),
    "rows": ToyModel(Rows),
    "uneven": ToyModel(Uneven),
    "twice": ToyModel(Twice),
    "recomputed": ToyModel(Recomputed),
    "unused": ToyModel(Unused, _UNUSED),
    "sporadic": ToyModel(
        Sporadic,
        _UNUSED
        | {
            "fsdp2": "fully_shard reduces what a rank has used, so ranks must use the same",
            _SIMPLE_FSDP: "each use of a weight is a gather, so ranks must use the same",
            "megatron_fsdp_v2": "megatron_fsdp.experimental reduces what a rank has used",
        },
    ),
    "sparse": ToyModel(
        SparseGradient,
        _DENSE_ADAM
        | {
            "fsdp2": "fully_shard copies gradients into a dense buffer and takes no sparse one",
            _SIMPLE_FSDP: "DTensor reduces no sparse gradient",
            "megatron_fsdp_v2": "megatron_fsdp.experimental takes no sparse gradient",
        },
    ),
    "rowwise": ToyModel(TensorParallel, _NOWHERE_ELSE),
    "experts": ToyModel(Experts, _NOWHERE_ELSE),
    "scalar": ToyModel(
        Scalar,
        {"megatron_fsdp_v2": "megatron_fsdp.experimental refuses parameters of shape ()"},
    ),
}


def build_toy_model(
    name: str, dtype: torch.dtype, device: torch.device, seed: int = 7
) -> nn.Module:
    """The model on `device`, weights drawn in FP64 from `seed`: equal on all ranks."""
    return build(TOY_MODELS[name].build, dtype, seed, _DEVIATION).to(device)


def microbatch(rank: int, index: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets: different for every rank, microbatch and step."""
    shape, generator = (2, BATCH, POSITIONS), generator_of(rank, index, step)
    drawn = torch.randint(VOCABULARY, shape, generator=generator)
    tokens, targets = drawn.to(device)
    return tokens, targets
