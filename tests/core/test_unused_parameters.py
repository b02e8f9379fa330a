"""Parameters that no rank has used in a cycle: None as in plain torch, or zeros where asked for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mfsdp_core import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard_model,
    fully_shard_optimizer,
    gather_full,
)
from oracle.beside_torch import WAYS, Pair, beside, mean_over_ranks, own_batch
from oracle.models import Block, loss
from oracle.ranks import RankPool, mesh, on_two_axes

pytestmark = pytest.mark.processes


class Branched(nn.Module):
    """Three units with a branch each, a branch of the root, and a unit that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WithBranch() for _ in range(3))
        self.aside = nn.Linear(8, 8)

    def forward(self, x: Tensor, branches: str) -> Tensor:
        for position, block in enumerate(self.blocks):
            if f"-{position}" not in branches:
                x = block(x, str(position) in branches)
        return x + self.aside(x) if "a" in branches else x


class WithBranch(Block):
    def __init__(self) -> None:
        super().__init__(width=8, hidden=16)
        self.branch = nn.Linear(8, 8)

    def forward(self, x: Tensor, branched: bool) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        return y + self.branch(x) if branched else y


#: Branches that the two ranks take, microbatch by microbatch, cycle by cycle.
CYCLES = (
    (("012a", "012a"),),
    (("", ""),),
    (("0", "1"),),
    (("a", ""), ("", "2")),
    (("-1", "-1"), ("-1 0", "-1")),
    (("-0", "-2"),),
)


def trained(way: tuple[str, str]) -> list[float]:
    """Largest error of gradients, norms and weights, with momentum and weight decay, per cycle."""
    pair = beside(Branched, way, units=[WithBranch], sync_model_each_microbatch=False)
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        for module in pair.both
    ]
    fully_shard_optimizer(optimizers[1])
    errors = []
    for number, cycle in enumerate(CYCLES):
        run_cycle(pair, number, cycle)
        error = pair.worst_gradient()
        for parameter in pair.plain.parameters():
            parameter.grad = mean_over_ranks(parameter)
        norms = [
            float(nn.utils.clip_grad_norm_(pair.plain.parameters(), 1.0)),
            float(clip_grad_norm_(pair.model, 1.0)),
        ]
        for optimizer in optimizers:
            optimizer.step()
        errors.append(max(error, abs(norms[0] - norms[1]), pair.worst_weight()))
        for optimizer in optimizers:
            optimizer.zero_grad()
    return errors


def run_cycle(pair: Pair, number: int, cycle: tuple[tuple[str, str], ...]) -> None:
    rank = mesh(2).get_local_rank("dp")
    for microbatch, branches in enumerate(cycle):
        for module in pair.both:
            batch = own_batch(10 * number + microbatch)
            loss(module(batch, branches[rank])).backward()
    pair.model.finish_grad_sync()


def names_without_gradients(outer_strategy: int) -> list[list[str]]:
    """Names without a gradient, by cycle, over 2 x 2 ranks; rank 3 alone takes a branch."""
    torch.manual_seed(0)
    model = fully_shard_model(
        Branched(),
        fsdp_unit_modules=[WithBranch],
        mixed_precision_policy=MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16),
        **on_two_axes(outer_strategy),
    )
    found = []
    for branches in ("a", "1", ""):
        taken = branches if torch.distributed.get_rank() == 3 else ""
        loss(model(torch.ones(2, 8), taken)).backward()
        found.append([name for name, p in model.named_parameters() if p.grad is None])
        model.zero_grad()
    return found


def zeros_where_asked_for(way: tuple[str, str]) -> tuple[bool, bool, Counter[str]]:
    pair = beside(Branched, way, units=[WithBranch], unused_parameters="zero")
    kinds: Counter[str] = Counter()
    pair.model.events.subscribe(lambda event: kinds.update([event.kind]))
    loss(pair.model(own_batch(1), "")).backward()
    unused = pair.model.module.aside.weight.grad
    return unused is not None, bool((gather_full(unused) == 0).all()), kinds


def messages_per_cycle(way: tuple[str, str]) -> list[int]:
    """Agreements of a cycle of three microbatches, of one that nobody marks, and of an evaluation.

    Their size in bytes comes last.
    """
    pair = beside(Branched, way, units=[WithBranch], sync_model_each_microbatch=False)
    model: Any = pair.model
    seen: list[int] = []
    model.events.subscribe(lambda event: seen.append(event.payload_bytes), kinds=["agreement"])
    counts = []
    for microbatch in range(3):
        if microbatch == 2:
            with model.sync():
                loss(model(own_batch(microbatch), "a")).backward()
        else:
            loss(model(own_batch(microbatch), "a")).backward()
    model.finish_grad_sync()
    counts.append(len(seen))
    model.zero_grad()
    loss(model(own_batch(3), "a")).backward()
    model.finish_grad_sync()
    model.finish_grad_sync()
    counts.append(len(seen))
    with torch.no_grad():
        model(own_batch(4), "a")
    return [*counts, len(seen), seen[0]]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_parameter_that_nobody_used_is_left_alone_as_by_plain_torch(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    for errors in ranks.run(trained, way):
        assert max(errors) < 1e-12, errors


@pytest.mark.parametrize("outer_strategy", [0, 1])
def test_one_rank_of_a_hybrid_mesh_speaks_for_all(ranks: RankPool, outer_strategy: int) -> None:
    branches = [[f"module.blocks.{i}.branch.{n}" for n in ("weight", "bias")] for i in range(3)]
    aside = ["module.aside.weight", "module.aside.bias"]
    for found in ranks.run(names_without_gradients, outer_strategy):
        assert sorted(found[0]) == sorted([*branches[0], *branches[1], *branches[2]])
        assert sorted(found[1]) == sorted([*branches[0], *branches[2], *aside])
        assert sorted(found[2]) == sorted([*branches[0], *branches[1], *branches[2], *aside])


@pytest.mark.parametrize("way", WAYS[:4], ids="-".join)
def test_zeros_can_be_had_without_a_message(ranks: RankPool, way: tuple[str, str]) -> None:
    for exists, is_zero, kinds in ranks.run(zeros_where_asked_for, way):
        assert exists
        assert is_zero
        assert kinds["collective"] > 0
        assert kinds["agreement"] == 0


@pytest.mark.parametrize("way", WAYS[:4], ids="-".join)
def test_ranks_exchange_one_byte_per_parameter_and_cycle(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    parameters = len(list(Branched().parameters()))
    assert ranks.run(messages_per_cycle, way) == [[1, 2, 2, parameters]] * 4
