"""A small model, sharded, beside the same in plain torch, which sees the data of all ranks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mfsdp_core
from bench.testing.toy_models import build
from conformance.judging import close
from mfsdp_core.state import local_step

WIDTH = 5
PREFIX = "module."


class Unit(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., WIDTH] to the same."""
        out: Tensor = x + self.down(self.up(x).tanh())
        return out


class Small(nn.Module):
    """Two units, and a parameter and a buffer of the root's own."""

    shift: Tensor
    units: Any
    unit: type[nn.Module] = Unit

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([self.unit(), self.unit()])
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("shift", torch.full((WIDTH,), 0.25))

    @property
    def unit_classes(self) -> tuple[type[nn.Module], ...]:
        """What is sharded as a unit."""
        return (self.unit,)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, WIDTH] to a loss."""
        for unit in self.units:
            x = unit(x)
        return (x * self.scale + self.shift).square().mean()


class Recomputing(Small):
    """With activations that are recomputed unit by unit."""

    def forward(self, x: Tensor) -> Tensor:
        """As `Small`."""
        for unit in self.units:
            x = checkpoint(unit, x, use_reentrant=False)
        return (x * self.scale + self.shift).square().mean()


class Stateful(Small):
    """All that makes state odd: a tie between units, extra state, a scalar and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.units[1].up.weight = self.units[0].up.weight
        self.gain = nn.Parameter(torch.empty(()))
        self.kernel = nn.Parameter(torch.empty(3, 2, 5))
        self.register_buffer("count", torch.tensor([1, 2, 257]))
        self.seen: dict[str, Any] = {"steps": 3}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state

    def forward(self, x: Tensor) -> Tensor:
        """As `Small`."""
        return super().forward(x * self.kernel.sum((0, 1))) * (1 + self.gain)


def pair(
    strategy: int = 3,
    module: Callable[[], nn.Module] = Small,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[Any, Any]:
    """A sharded model, and plain torch's with the same weights."""
    plain = build(module, dtype, 3, 0.4)
    policy = options.pop("mixed_precision_policy", mfsdp_core.MixedPrecisionPolicy(None))
    units = options.pop("fsdp_unit_modules", getattr(plain, "unit_classes", ()))
    model = mfsdp_core.fully_shard_model(
        copy.deepcopy(plain),
        fsdp_unit_modules=list(units) or None,
        zero_dp_strategy=strategy,
        mixed_precision_policy=policy,
        **options,
    )
    return model, plain


def batch(number: int = 0, rank: int | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Inputs of a rank, its own if none is named."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def plain_backward(plain: nn.Module, *numbers: int, times: float = 1.0) -> None:
    """Add the mean over ranks of the gradients of these batches."""
    ranks = dist.get_world_size()
    dtype = next(plain.parameters()).dtype
    for number in numbers:
        for rank in range(ranks):
            (plain(batch(number, rank, dtype)) * times / ranks).backward()


def name_of(parameter_name: str) -> str:
    """In the bare module."""
    return parameter_name.removeprefix(PREFIX)


def whole_weights(model: Any) -> dict[str, Tensor]:
    """By names of the bare module."""
    return {
        # A sharded scalar is one row.
        name_of(n): mfsdp_core.gather_full(p.detach()).reshape(p.orig_param.shape)
        for n, p in model.named_parameters()
    }


def compare_gradients(
    model: nn.Module, plain: nn.Module, relative: float = 1e-11, attribute: str = "grad"
) -> None:
    """All of them.

    Raises:
        AssertionError: one differs.
    """
    wanted = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        expected, found = wanted[name_of(name)].grad, getattr(parameter, attribute, None)
        assert (found is None) == (expected is None), f"gradient of {name}: {found}, {expected}"
        if expected is not None:
            close(f"gradient of {name}", mfsdp_core.gather_full(found), expected, relative)


def compare_weights(model: nn.Module, plain: nn.Module, relative: float = 1e-11) -> None:
    """All of them.

    Raises:
        AssertionError: one differs.
    """
    own = {name_of(name): parameter.detach() for name, parameter in model.named_parameters()}
    for name, wanted in plain.named_parameters():
        found = mfsdp_core.gather_full(own[name])
        found = found if wanted.ndim else found.reshape(())  # a sharded scalar is one row
        close(f"weight {name}", found, wanted.detach(), relative)


def train_beside(
    model: Any, optimizer: Any, plain: Any, reference: Any, *steps: int, relative: float = 1e-11
) -> None:
    """Train both on the batches of these numbers, and compare all weights.

    Raises:
        AssertionError: one differs.
    """
    for step in steps:
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain_backward(plain, step)
        reference.step()
        reference.zero_grad()
    compare_weights(model, plain, relative)


def reread(value: Any, **options: Any) -> Any:
    """What `torch.load` makes, with its defaults unless told, of what `torch.save` wrote."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, **options)


def on_first(change: Callable[[], Any]) -> None:
    """Call it on the first rank while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        change()
    dist.barrier()


@contextmanager
def counted_pieces(elements: int | None) -> Iterator[list[int]]:
    """How many pieces each shard is cut into, if it is. elements: of a piece, None is the usual."""
    counts: list[int] = []
    restore = local_step._Swapped.restore

    def counted(self: Any) -> None:
        counts.extend([len(self.stand_ins)] if len(self.stand_ins) > 1 else [])
        restore(self)

    with (
        mock.patch.object(local_step, "PIECE_ELEMENTS", elements or local_step.PIECE_ELEMENTS),
        mock.patch.object(local_step._Swapped, "restore", counted),
    ):
        yield counts
