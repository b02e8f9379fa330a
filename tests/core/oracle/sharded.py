"""The only module where tests build and drive the implementation under test. Runs inside a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from oracle.cycles import named, run_cycle
from oracle.models import TOYS, batch, build, loss
from oracle.ranks import mesh
from oracle.reference import Named, compare, expected_gradient

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass
class Sharded:
    """A toy model under test, and how to drive it. Every method is called on all ranks."""

    name: str
    group_size: int
    dtype: torch.dtype
    model: Any

    def forward(self, microbatch: int = 0, cycle: int = 0) -> torch.Tensor:
        """Loss of one microbatch of this rank."""
        rank = mesh(self.group_size).get_local_rank("dp")
        return loss(self.model(batch(self.name, rank, microbatch, self.dtype, cycle)))

    def backward(self, microbatch: int = 0, cycle: int = 0) -> float:
        """Forward and backward of one microbatch of this rank; returns the loss."""
        value = self.forward(microbatch, cycle)
        value.backward()
        return float(value.detach())

    def run_cycle(self, microbatches: int, cycle: int = 0) -> None:
        """All microbatches of this rank up to the finished gradient; all but the last `no_sync`."""
        rank = mesh(self.group_size).get_local_rank("dp")
        inputs = [batch(self.name, rank, j, self.dtype, cycle) for j in range(microbatches)]
        run_cycle(self.model, loss, inputs)

    def trained(self, steps: int) -> list[Any]:
        """Losses of both microbatches of every AdamW step, then the whole main weights."""
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = fully_shard_optimizer(torch.optim.AdamW(trainable, lr=0.01, foreach=False))
        found: list[Any] = []
        for step in range(steps):
            for microbatch in range(2):
                with self.model.sync() if microbatch else self.model.no_sync():
                    found.append(self.backward(microbatch, step))
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *self.full_parameters().values()]

    def parameters(self) -> list[tuple[str, Any]]:
        """Optimizer parameters under the names that the bare module gives them."""
        return named(self.model)

    def full_gradient(self) -> Named:
        """Gradient of every trainable parameter, put together from all shards (a collective)."""
        return self._joined({key: p.grad for key, p in self.parameters() if p.requires_grad})

    def compare_gradient(self, microbatches: int, cycle: int = 0, relative: float = 1e-12) -> None:
        """That of a cycle on the first weights, with the mean over ranks by plain torch.

        Raises:
            AssertionError: one differs, or is NaN.
        """
        wanted = expected_gradient(self.name, self.group_size, microbatches, self.dtype, cycle)
        compare(self.full_gradient(), wanted, relative)

    def full_parameters(self) -> Named:
        """Main weights of every parameter, put together from all shards (a collective)."""
        return self._joined({key: p.detach() for key, p in self.parameters()})

    def _joined(self, shards: dict[str, DTensor]) -> Named:
        """Whole tensors from shards: rows of dim 0 in rank order, or any replica; not our code."""
        group = mesh(self.group_size).get_group("dp")
        pieces: list[Any] = [None] * self.group_size
        local = {key: shard.to_local().cpu() for key, shard in shards.items()}
        dist.all_gather_object(pieces, local, group=group)
        return {
            key: local[key].clone()
            if isinstance(shard.placements[0], Replicate)
            else torch.cat([piece[key] for piece in pieces])
            for key, shard in shards.items()
        }


def shard(
    name: str,
    strategy: str | int,
    group_size: int,
    dtype: torch.dtype = torch.float32,
    **arguments: Any,
) -> Sharded:
    """The toy model `name`, sharded; main weights have the model's dtype unless told otherwise."""
    arguments.setdefault("sync_model_each_microbatch", False)
    # The oracle counts a gradient that nobody has as zeros.
    arguments.setdefault("unused_parameters", "zero")
    arguments.setdefault("mixed_precision_policy", MixedPrecisionPolicy(main_params_dtype=dtype))
    model = fully_shard_model(
        build(name, dtype),
        device_mesh=mesh(group_size),
        dp_shard_dim="dp",
        fsdp_unit_modules=list(TOYS[name].units),
        zero_dp_strategy=strategy,
        **arguments,
    )
    return Sharded(name, group_size, dtype, model)


def weights_seen(toy: Sharded) -> dict[str, torch.Tensor]:
    """In a rank: every compute weight that a module sees during a forward pass, by name."""
    names = {id(module): name for name, module in toy.model.module.named_modules()}
    seen: dict[str, torch.Tensor] = {}

    def note(module: torch.nn.Module, *_: Any) -> None:
        for child in module.modules():
            for key, value in child._parameters.items():
                if value is not None and not hasattr(value, "placements"):
                    seen[f"{names[id(child)]}.{key}".lstrip(".")] = value.detach().clone()

    for module in toy.model.module.modules():
        module.register_forward_pre_hook(note)
    toy.forward()
    return seen
