"""Ranges of units and collectives: their names are stable, and each that begins ends."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from mfsdp_core import annotated, fully_shard_model, fully_shard_optimizer


@pytest.fixture(autouse=True)
def fake_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Stack(nn.Module):
    def __init__(self, recomputes) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.recomputes = recomputes

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


def ranges(*, recomputes=False):
    """Names in the order in which they began; what is open at the end; most open at once."""
    model = fully_shard_model(
        Stack(recomputes), fsdp_unit_modules=[Block], transport="native", zero_dp_strategy=3
    )
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    begun, still_open, together = [], Counter(), []

    def begin(name):
        begun.append(name)
        still_open[name] += 1
        together.append([one for one in still_open.elements() if one.startswith("backward")])
        return name

    with annotated(model, begin, lambda name: still_open.subtract([name])):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    quiet = len(begun)
    model(torch.ones(1, 4))
    assert len(begun) == quiet
    return begun, +still_open, max(map(len, together))


def test_units_and_collectives_have_ranges_that_all_end():
    begun, left, together = ranges()
    units = [name for name in begun if " of " not in name]
    assert units == [
        "forward root",
        "forward layers.0",
        "forward layers.1",
        "backward layers.1",
        "backward layers.0",
    ]
    counts = Counter(name for name in begun if " of " in name)
    assert counts["all_gather of layers.0/0"] == 2
    assert counts["reduce_scatter of layers.1/0"] == 1
    assert not left
    assert together == 1


def test_recomputation_is_a_range_of_its_own():
    begun, left, _ = ranges(recomputes=True)
    assert begun.count("recompute layers.0") == 1
    assert begun.count("forward layers.0") == 1
    assert not left
