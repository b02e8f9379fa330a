"""Drives models that are no toys (`oracle.sharded` drives those), and reads their shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mfsdp_core import clip_grad_norm_, fully_shard_optimizer, gather_full
from oracle.reference import Named, compare


def run_cycle(model: Any, loss: Callable[[Tensor], Tensor], microbatches: Sequence[Tensor]) -> None:
    """All microbatches of this rank up to the finished gradient; all but the last in `no_sync`."""
    for number, inputs in enumerate(microbatches, start=1):
        value = loss(model(inputs))
        if number < len(microbatches):
            with model.no_sync():
                value.backward()
        else:
            value.backward()
    model.finish_grad_sync()


def named(model: Any) -> list[tuple[str, Any]]:
    """Optimizer parameters under the names that the bare module gives them."""
    return [(key.removeprefix("module."), p) for key, p in model.named_parameters()]


def gathered(shards: Mapping[str, Any]) -> Named:
    """By the core's own gather."""
    return {key: gather_full(shard) for key, shard in shards.items()}


@dataclass(frozen=True)
class Twins:
    """A sharded model, and one of plain torch that sees the batches of all data-parallel ranks.

    batch: by rank, microbatch and cycle. rank: of so many `ranks` that share gradients.
    """

    model: Any
    twin: nn.Module
    loss: Callable[[Tensor], Tensor]
    batch: Callable[[int, int, int], Tensor]
    rank: int
    ranks: int

    def run(self, microbatches: int, cycle: int, divisor: float | None = None) -> None:
        """A cycle of both. divisor: of the twin's sum over ranks, whose number it is otherwise."""
        own = [self.batch(self.rank, j, cycle) for j in range(microbatches)]
        run_cycle(self.model, self.loss, own)
        for rank in range(self.ranks):
            for j in range(microbatches):
                value = self.loss(self.twin(self.batch(rank, j, cycle)))
                (value / (divisor or self.ranks)).backward()

    def compare(self, shards: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """The whole tensors of `shards`. A rank need not have every expert.

        Raises:
            AssertionError: one differs by 1e-12, or is NaN.
        """
        assert all(key in shards or ".experts." in key for key in wanted), sorted(shards)
        compare(gathered(shards), {key: wanted[key].detach() for key in shards})

    def compare_gradients(self, divisor: float | None = None) -> None:
        """For 1 to 3 microbatches, one cycle after another."""
        for cycle, microbatches in enumerate((1, 2, 3)):
            self.twin.zero_grad()
            self.run(microbatches, cycle, divisor)
            shards = {key: p.grad for key, p in named(self.model)}
            self.compare(shards, {key: p.grad for key, p in self.twin.named_parameters()})
            self.model.zero_grad_buffer()

    def compare_training(self, **options: Any) -> None:
        """Norms, weights and moments of three AdamW steps, each of which clips."""
        adamw, clip = torch.optim.AdamW, 0.1
        optimizer = adamw(self.model.parameters(), lr=0.01, **options)
        fully_shard_optimizer(optimizer)
        reference = adamw(self.twin.parameters(), lr=0.01)
        for cycle in range(3):
            self.run(2, cycle)
            norm = float(clip_grad_norm_(self.model, clip))
            expected = float(nn.utils.clip_grad_norm_(self.twin.parameters(), clip))
            assert abs(norm / expected - 1) < 1e-12, f"norm {norm}, expected {expected}"
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
        weights, shards = dict(self.twin.named_parameters()), dict(named(self.model))
        self.compare({key: p.detach() for key, p in shards.items()}, weights)
        for key, parameter in shards.items():
            moment = gather_full(optimizer.state[parameter]["exp_avg"])
            torch.testing.assert_close(moment, reference.state[weights[key]]["exp_avg"])
