"""A module under test beside the same module under plain torch; runs inside a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mfsdp_core import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard_model,
    fully_shard_optimizer,
    gather_full,
)
from oracle.cycles import named, run_cycle
from oracle.models import Block, loss
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
    """plain: the module as torch runs it. model: the same module, sharded.

    group: over which plain torch's gradients are averaged; None are the two ranks of `mesh(2)`. It
    may hold several ranks with equal data. A rank's model need not have every expert of `plain`.
    """

    plain: nn.Module
    model: Any
    group: dist.ProcessGroup | None = None

    @property
    def both(self) -> tuple[nn.Module, Any]:
        """Both modules, for what is done to one after the other."""
        return self.plain, self.model

    def backward(self, *batches: Tensor) -> None:
        """A cycle of a microbatch for each, on both sides."""
        run_cycle(self.model, loss, batches)
        for batch in batches:
            loss(self.plain(batch)).backward()

    def compare_gradients(self, relative: float = 1e-12, times: float = 1.0) -> None:
        """All of them; the gradient of plain torch is the mean over ranks, so many times.

        Raises:
            AssertionError: one differs, or is NaN.
        """
        # Collectives on every rank, whatever a single rank has found.
        wanted = self.means()
        found = dict(named(self.model))
        assert all(name in found or ".experts." in name for name in wanted), sorted(found)
        for name, parameter in found.items():
            mean = wanted[name]
            full = None if parameter.grad is None else gather_full(parameter.grad)
            assert (full is None) == (mean is None), f"gradient of {name}: {full}, wanted {mean}"
            if full is not None and mean is not None:
                near(f"gradient of {name}", full, mean * times, relative)

    def compare_weights(self, relative: float = 1e-12) -> None:
        """All main weights.

        Raises:
            AssertionError: one differs from that of plain torch, or is NaN.
        """
        wanted = dict(self.plain.named_parameters())
        for name, found in named(self.model):
            near(name, gather_full(found).detach(), wanted[name].detach(), relative)

    def compare_training(self, batch: Callable[[int, int], Tensor], **options: Any) -> None:
        """Gradients, norms and weights of three AdamW steps, each of which clips.

        batch: of this rank, by microbatch and cycle; a cycle has one to three of them.

        Raises:
            AssertionError: one differs, or is NaN.
        """
        clip = 0.1
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        fully_shard_optimizer(optimizer)
        reference = torch.optim.AdamW(self.plain.parameters(), lr=0.01)
        for cycle in range(3):
            self.backward(*(batch(j, cycle) for j in range(cycle + 1)))
            self.compare_gradients()
            self.average()
            norm = float(clip_grad_norm_(self.model, clip))
            expected = float(nn.utils.clip_grad_norm_(self.plain.parameters(), clip))
            assert abs(norm / expected - 1) < 1e-12, f"norm {norm}, expected {expected}"
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
            self.compare_weights()

    def means(self) -> dict[str, Tensor | None]:
        """Plain torch's gradients, averaged over ranks; None where no rank has one."""
        group = self.group or mesh(2).get_group("dp")
        return {name: _mean(p, group) for name, p in self.plain.named_parameters()}

    def average(self) -> None:
        """Plain torch's gradients become their means, so that it steps as one process does."""
        for (_, parameter), mean in zip(
            self.plain.named_parameters(), self.means().values(), strict=True
        ):
            parameter.grad = mean

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
    """The module of `factory`, seeded alike, plain and sharded, over two ranks unless told.

    way: strategy and allocator. dtype: None leaves the module in those that it was built with.
    """
    strategy, allocator = way
    torch.manual_seed(3)
    plain = factory() if dtype is None else factory().to(dtype)
    torch.manual_seed(3)
    arguments.setdefault("mixed_precision_policy", MixedPrecisionPolicy(main_params_dtype=None))
    arguments.setdefault("pool_slots", 4)
    if "device_mesh" not in arguments:
        arguments["device_mesh"] = mesh(2)["dp"]
    model = fully_shard_model(
        factory() if dtype is None else factory().to(dtype),
        fsdp_unit_modules=list(units) or None,
        zero_dp_strategy=strategy,
        allocator=allocator,
        **arguments,
    )
    return Pair(plain, model)


def fail_and_load(model: Any, batch: Tensor) -> None:
    """A forward pass that raises, a backward pass that does, and a load of the weights held."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with model.module.register_forward_hook(fail), pytest.raises(ZeroDivisionError):
        model(batch)
    output = model(batch)
    output.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss(output).backward()
    model.zero_grad()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


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


def _mean(parameter: Tensor, group: dist.ProcessGroup) -> Tensor | None:
    total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    exists = torch.tensor(float(parameter.grad is not None))
    for value in (total.detach(), exists):
        dist.all_reduce(value, group=group)
    return total.detach() / dist.get_world_size(group) if exists else None
