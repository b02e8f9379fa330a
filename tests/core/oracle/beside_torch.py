"""A module under test beside the same module under plain torch; runs inside a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, gather_full
from oracle.models import Block
from oracle.ranks import mesh
from oracle.sharded import STRATEGIES

#: Strategy and allocator: every strategy with the default one, and every allocator where weights
#: come and go.
WAYS = (
    *((strategy, "storage_resize") for strategy in STRATEGIES),
    *(("optim_grads_params", name) for name in ("temporary", "fixed_pool", "max_pool")),
)


@dataclass
class Pair:
    """plain: the module as torch runs it. model: the same module, sharded over two ranks."""

    plain: nn.Module
    model: Any

    @property
    def both(self) -> tuple[nn.Module, Any]:
        """Both modules, for what is done to one after the other."""
        return self.plain, self.model

    def compare_gradients(self, relative: float = 1e-12) -> None:
        """All of them; the gradient of plain torch is the mean over ranks.

        Raises:
            AssertionError: one differs, or is NaN.
        """
        wanted = dict(self.plain.named_parameters())
        for name, found in self.model.named_parameters():
            # Collectives on every rank, whatever a single rank has found.
            mean = mean_over_ranks(wanted[name.removeprefix("module.")])
            full = None if found.grad is None else gather_full(found.grad)
            assert (full is None) == (mean is None), f"gradient of {name}: {full}, wanted {mean}"
            if full is not None and mean is not None:
                near(f"gradient of {name}", full, mean, relative)

    def compare_weights(self, relative: float = 1e-12) -> None:
        """All main weights.

        Raises:
            AssertionError: one differs from that of plain torch, or is NaN.
        """
        wanted = dict(self.plain.named_parameters())
        for name, found in self.model.named_parameters():
            value = wanted[name.removeprefix("module.")].detach()
            near(name, gather_full(found).detach(), value, relative)

    def zero_grad(self) -> None:
        """Begin a new cycle on both sides."""
        self.plain.zero_grad()
        self.model.zero_grad()


def beside(
    factory: Callable[[], nn.Module],
    way: Sequence[str],
    *,
    units: Sequence[type[nn.Module]] = (Block,),
    dtype: torch.dtype | None = torch.float64,
    **arguments: Any,
) -> Pair:
    """The module of `factory`, seeded alike, plain and sharded.

    way: strategy and allocator. dtype: None leaves the module in those that it was built with.
    """
    strategy, allocator = way
    torch.manual_seed(3)
    plain = factory() if dtype is None else factory().to(dtype)
    torch.manual_seed(3)
    arguments.setdefault("mixed_precision_policy", MixedPrecisionPolicy(main_params_dtype=None))
    arguments.setdefault("pool_slots", 4)
    model = fully_shard_model(
        factory() if dtype is None else factory().to(dtype),
        device_mesh=mesh(2)["dp"],
        fsdp_unit_modules=list(units) or None,
        zero_dp_strategy=strategy,
        allocator=allocator,
        **arguments,
    )
    return Pair(plain, model)


def own_batch(seed: int, *shape: int) -> Tensor:
    """An input that differs between the two ranks of a group."""
    rank = mesh(2).get_local_rank("dp")
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(*(shape or (4, 8)), dtype=torch.float64, generator=generator)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative difference in the 2-norm; NaN, and anything instead of zero, is infinitely far."""
    apart, size = float((found - wanted).detach().norm()), float(wanted.detach().norm())
    if math.isnan(apart):
        return math.inf
    return apart / size if size else math.inf if apart else 0.0


def near(what: str, found: Tensor, wanted: Tensor, relative: float = 1e-12) -> None:
    """As `distance` has it; one row may stand for a scalar.

    Raises:
        AssertionError: further apart than `relative`, or of another shape.
    """
    is_scalar = wanted.ndim == 0 and found.numel() == 1
    assert is_scalar or found.shape == wanted.shape, (
        f"{what}: {tuple(found.shape)}, expected {tuple(wanted.shape)}"
    )
    apart = distance(found.reshape(wanted.shape), wanted)
    assert apart < relative, f"{what}: off by {apart:.3g}, expected less than {relative:.3g}"


def mean_over_ranks(parameter: Tensor) -> Tensor | None:
    """The mean of the gradients of two ranks, by torch; None where neither has one."""
    group = mesh(2).get_group("dp")
    total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    exists = torch.tensor(float(parameter.grad is not None))
    for value in (total.detach(), exists):
        dist.all_reduce(value, group=group)
    return total.detach() / dist.get_world_size(group) if exists else None
