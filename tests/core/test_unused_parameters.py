"""Parameters that no rank has used in a cycle: None as in plain torch, or zeros where asked for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model
from mfsdp_core.errors import LifecycleError
from mfsdp_core.events import Event
from oracle.beside_torch import WAYS, beside, own_batch
from oracle.models import Block, Branched, loss
from oracle.ranks import mesh, on_two_axes
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.on_ranks


class Branching(nn.Module):
    """Three units with a branch each, a branch of the root, and a unit that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branched() for _ in range(3))
        self.aside = nn.Linear(8, 8)

    def forward(self, x: Tensor, branches: str) -> Tensor:
        for position, block in enumerate(self.blocks):
            if f"-{position}" not in branches:
                x = block(x, str(position) in branches)
        return x + self.aside(x) if "a" in branches else x


@pytest.mark.parametrize("agreed", [False, True])
@pytest.mark.parametrize("branches", [("012a", "012a"), ("012a", "-1"), ("01a", "-1 2")])
def test_ranks_on_other_paths_issue_the_same_collectives_and_hold_two_units_at_most(
    branches: tuple[str, str], agreed: bool
) -> None:
    """test_programs.py has the gradients. agreed: all have seen the same order of units before."""
    model = beside(Branching, WAYS[3], units=[Branched]).model
    for _ in range(2 * agreed):
        loss(model(own_batch(0), "012a")).backward()
        model.zero_grad()
    counts: Counter[str] = Counter()
    sent: list[tuple[str, str]] = []
    held: set[str] = set()
    most: list[int] = []

    def follow(event: Event) -> None:
        if event.kind == "collective":
            counts[event.operation] += 1
            sent.append((event.operation, event.bucket))
        elif event.kind == "materialise":
            held.add(event.bucket)
        elif event.kind == "release":
            held.discard(event.bucket)
        most.append(len({bucket.partition("/")[0] for bucket in held}))

    model.events.subscribe(follow)
    loss(model(own_batch(0), branches[mesh(2).get_local_rank("dp")])).backward()
    buckets = model.buckets()
    of_units = sum(bool(bucket.unit) for bucket in buckets)
    # Those of units are gathered for the forward and for the backward pass.
    assert counts == {"all_gather": 2 * of_units, "reduce_scatter": len(buckets)}, counts
    assert max(most) == 2, most
    sent.sort(key=lambda one: one[0])  # gathers, then reductions, each in their order
    by_rank: list[Any] = [None, None]
    dist.all_gather_object(by_rank, sent, group=mesh(2).get_group("dp"))
    assert by_rank[0] == by_rank[1]
    reduced = [bucket for operation, bucket in sent if operation == "reduce_scatter"]
    place = 0 if agreed else -2  # of the root's branch
    assert {reduced[place], reduced[place + 1]} == {"(root)/0", "(root)/1"}, reduced


class ReadTwice(nn.Module):
    """Reads the weight of its head in front of the units as well, without calling the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.head.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_head_that_is_read_in_front_of_the_units_as_well_is_reduced_last(strategy: str) -> None:
    pair = beside(ReadTwice, (strategy, "storage_resize"))
    sent: list[str] = []
    pair.model.events.subscribe(
        lambda event: sent.append(event.bucket) if "reduce" in event.operation else None,
        ("collective",),
    )
    for number in range(3):
        sent.clear()
        pair.backward(own_batch(number, 4, 6))
        reduced = sent.copy()
        pair.compare_gradients()
        pair.zero_grad()
        assert reduced.index("(root)/0") == len(reduced) - 1, reduced


class Crossed(Branching):
    """Runs its units in another order than they are registered."""

    def forward(self, x: Tensor, left_out: int = -1) -> Tensor:
        for position in (1, 0, 2):
            if position != left_out:
                x = self.blocks[position](x, True)
        return self.aside(x)


def test_ranks_leave_out_different_units_in_an_order_that_is_known_or_are_refused() -> None:
    """Before a pass has shown the order on all ranks, each would gather in an order of its own."""
    left_out = (-1, 2)[mesh(2).get_local_rank("dp")]
    unknown = beside(Crossed, WAYS[3], units=[Branched]).model
    with pytest.raises(LifecycleError, match=r"rank 1 ran units .*: \(1, 0\)\. .*prefetch_order"):
        unknown(own_batch(0), left_out)
    for given in ({}, {"prefetch_order": ["blocks.1", "blocks.0", "blocks.2"]}):
        pair = beside(Crossed, WAYS[3], units=[Branched], unused_parameters="zero", **given)
        if not given:
            pair.model(own_batch(0))
        for one in pair.both:
            for step in range(2):
                loss(one(own_batch(step), left_out)).backward()
        pair.compare_gradients()


@pytest.mark.parametrize("outer_strategy", [0, 1])
def test_one_rank_of_a_hybrid_mesh_speaks_for_all(outer_strategy: int) -> None:
    """Rank 3 of 2 x 2 alone takes a branch."""
    model = fully_shard_model(
        Branching(),
        fsdp_unit_modules=[Branched],
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
