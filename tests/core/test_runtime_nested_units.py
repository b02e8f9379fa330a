"""Units inside units: who owns what, ties between them, and the gradient of one process."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance.judging import same
from oracle.beside_torch import Pair, beside, own_batch
from oracle.models import Block, loss
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.on_ranks


class Gate(nn.Module):
    """A unit without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class Stage(nn.Module):
    """Two inner units that share a weight, between parameters of its own; returns the last unit's
    output as it is, so that both units hook the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(width=8, hidden=16) for _ in range(2))
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return x


class Bare(nn.Module):
    """Two inner units, and no parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width=8, hidden=16) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.blocks(x)


class Nested(nn.Module):
    """Stages of both kinds; one weight is shared by inner units of two of them."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.stages = nn.ModuleList([Stage(), Bare(), Stage()])
        self.stages[2].blocks[0].down.weight = self.stages[0].blocks[1].down.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            if self.recompute != "none" and torch.is_grad_enabled():
                x = checkpoint(stage, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = stage(x)
        return self.head(x)


def nested(strategy: str, recompute: str, which: str) -> Pair:
    return beside(
        lambda: Nested(recompute),
        (strategy, "storage_resize"),
        units=[Stage, Bare, Block, Gate],
        sync_model_each_microbatch=False,
        nested_units=which,
    )


def objects_of_the_core() -> list[object]:
    """All objects of the core's own classes."""
    gc.collect()
    # Some types of C have a descriptor in place of the name.
    return [one for one in gc.get_objects() if str(type(one).__module__).startswith("mfsdp_core.")]


def owners(which: str) -> dict[str, set[str]]:
    """Parameters by the unit that owns them."""
    context = nested("optim_grads_params", "none", which).model._context
    assert [unit.index for unit in context.units] == list(range(len(context.units)))
    found: dict[str, set[str]] = {}
    for unit in (context.root, *context.units):
        for group in unit.buckets:
            names = {managed.names[0] for managed in group.parameters}
            found.setdefault(unit.name, set()).update(names)
    return found


def test_units_inside_units_own_their_parameters_where_all_matches_are_asked_for() -> None:
    found = owners("all")
    assert "stages.1" not in found  # no parameter of its own
    assert not any(name.endswith("gate") for name in found)
    stage = {"stages.0.enter.weight", "stages.0.enter.bias", "stages.0.blocks.0.up.weight"}
    assert found["stages.0"] == stage, found
    assert found[""] == {"stages.0.blocks.1.down.weight", "head.weight", "head.bias"}, found
    assert "stages.2.blocks.0.up.bias" in found["stages.2.blocks.0"], found
    assert set(owners("outermost")) == {"", "stages.0", "stages.1", "stages.2"}


@pytest.mark.sample
@pytest.mark.parametrize("which", ["all", "outermost"])
@pytest.mark.parametrize("recompute", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nested_units_get_the_gradient_of_one_process_and_leak_nothing(
    strategy: str, recompute: str, which: str
) -> None:
    # Kept: what an earlier test left on this rank must not go between the two counts.
    earlier = objects_of_the_core()
    pair = nested(strategy, recompute, which)
    model = pair.model
    at_rest = model.ledger.bytes_by_category()
    objects = []
    for cycle in range(2):
        for j in range(2):
            x = own_batch(10 * cycle + j, 3, 8).requires_grad_()
            loss(pair.plain(x)).backward()
            with model.no_sync():
                loss(model(x)).backward()
            with torch.no_grad():
                model(x)
        model.finish_grad_sync()
        pair.compare_gradients()
        pair.zero_grad()
        objects.append(len(objects_of_the_core()))
    del earlier
    same("bytes at rest", model.ledger.bytes_by_category(), at_rest)
    same("objects of the core", objects[1], objects[0])
