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
from oracle.beside_torch import WAYS, beside, mean_over_ranks, own_batch
from oracle.models import Block, loss
from oracle.ranks import mesh, on_two_axes

pytestmark = pytest.mark.on_ranks


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


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_parameter_that_nobody_used_is_left_alone_as_by_plain_torch(way: tuple[str, str]) -> None:
    """In gradients, norms and weights, with momentum and weight decay."""
    pair = beside(Branched, way, units=[WithBranch], sync_model_each_microbatch=False)
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        for module in pair.both
    ]
    fully_shard_optimizer(optimizers[1])
    rank = mesh(2).get_local_rank("dp")
    for number, cycle in enumerate(CYCLES):
        for microbatch, branches in enumerate(cycle):
            for module in pair.both:
                batch = own_batch(10 * number + microbatch)
                loss(module(batch, branches[rank])).backward()
        pair.model.finish_grad_sync()
        pair.compare_gradients()
        for parameter in pair.plain.parameters():
            parameter.grad = mean_over_ranks(parameter)
        wanted = float(nn.utils.clip_grad_norm_(pair.plain.parameters(), 1.0))
        assert abs(float(clip_grad_norm_(pair.model, 1.0)) - wanted) < 1e-12
        for optimizer in optimizers:
            optimizer.step()
        pair.compare_weights()
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("outer_strategy", [0, 1])
def test_one_rank_of_a_hybrid_mesh_speaks_for_all(outer_strategy: int) -> None:
    """Rank 3 of 2 x 2 alone takes a branch."""
    model = fully_shard_model(
        Branched(),
        fsdp_unit_modules=[WithBranch],
        mixed_precision_policy=MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16),
        **on_two_axes(outer_strategy),
    )
    names = [f"module.blocks.{i}.branch.{n}" for i in range(3) for n in ("weight", "bias")]
    aside = ["module.aside.weight", "module.aside.bias"]
    for branches, unused in (
        ("a", names),
        ("1", [*names[:2], *names[4:], *aside]),
        ("", [*names, *aside]),
    ):
        taken = branches if torch.distributed.get_rank() == 3 else ""
        loss(model(torch.ones(2, 8), taken)).backward()
        found = sorted(name for name, p in model.named_parameters() if p.grad is None)
        assert found == sorted(unused), (branches, found)
        model.zero_grad()


@pytest.mark.parametrize("way", WAYS[:4], ids="-".join)
def test_zeros_can_be_had_without_a_message(way: tuple[str, str]) -> None:
    pair = beside(Branched, way, units=[WithBranch], unused_parameters="zero")
    kinds: Counter[str] = Counter()
    pair.model.events.subscribe(lambda event: kinds.update([event.kind]))
    loss(pair.model(own_batch(1), "")).backward()
    assert bool((gather_full(pair.model.module.aside.weight.grad) == 0).all())
    assert kinds["collective"] > 0
    assert kinds["agreement"] == 0


@pytest.mark.parametrize("way", WAYS[:4], ids="-".join)
def test_ranks_exchange_one_byte_per_parameter_and_cycle(way: tuple[str, str]) -> None:
    """In a cycle of three microbatches, in one that nobody marks, and not in an evaluation."""
    pair = beside(Branched, way, units=[WithBranch], sync_model_each_microbatch=False)
    model: Any = pair.model
    seen: list[int] = []
    model.events.subscribe(lambda event: seen.append(event.payload_bytes), kinds=["agreement"])
    size = len(list(Branched().parameters()))
    for microbatch in range(3):
        if microbatch == 2:
            with model.sync():
                loss(model(own_batch(microbatch), "a")).backward()
        else:
            loss(model(own_batch(microbatch), "a")).backward()
    model.finish_grad_sync()
    assert seen == [size]
    model.zero_grad()
    loss(model(own_batch(3), "a")).backward()
    model.finish_grad_sync()
    model.finish_grad_sync()
    assert seen == [size, size]
    with torch.no_grad():
        model(own_batch(4), "a")
    assert seen == [size, size]
