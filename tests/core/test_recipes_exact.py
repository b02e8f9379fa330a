"""Training with quantised weights is, bit by bit, what one process makes of the whole tensors.

The single process quantises whole matrices (`bench.testing.quantised`), runs every rank's
microbatches through the bare model, with what a backward pass reads where autograd has saved
weights, and adds the gradients up in the order in which the ranks do. Ranks are a power of two, so
that where the mean is divided changes no bit.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.testing.quantised import quantised
from bench.testing.reference import gradient
from conformance.judging import same
from mfsdp_core import Float8Reference, MixedPrecisionPolicy, fully_shard_optimizer
from oracle.hybrid import PAIRS, hybrid
from oracle.models import batch, build, loss
from oracle.seen_weights import weights_seen
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.on_ranks

F32 = torch.float32
MICROBATCHES = 2
RECIPES = ("delayed", "current", "block", "mxfp8")
#: A bucket of two matrices and tied weights; buckets that leave ranks without a row.
NAMES = ("tied_embedding", "unequal_units")


def spread(model: Any) -> None:
    """Give weights a range that FP8 does not have, so that rows and columns differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
            local.copy_(local.sign() * (1.5 * local.abs()) ** 5)


class Single:
    """One process. encoded: the weights at every encoding so far."""

    def __init__(self, name: str, recipe: str) -> None:
        self.name = name
        self.model = build(name, F32)
        self.recipe = recipe
        self.encoded: list[dict[str, Tensor]] = []

    def read(self, weights: dict[str, Tensor], *, backward: bool) -> None:
        for key, parameter in self.model.named_parameters():
            earlier = [before[key] for before in self.encoded]
            parameter.data.copy_(
                quantised(self.recipe, weights[key], F32, earlier, backward=backward)
            )

    def contribution(self, weights: Any, rank: int, index: int, cycle: int) -> tuple[Any, float]:
        def value() -> Tensor:
            self.read(weights, backward=False)
            found = loss(self.model(batch(self.name, rank, index, F32, cycle)))
            self.read(weights, backward=True)
            return found

        found, number = gradient(self.model, value)
        return found, float(number)

    def gradients(self, toy: Any, weights: Any, cycle: int, strategy: str, outer: int) -> Any:
        """The mean as ranks add it up; and the losses of all ranks and microbatches."""
        made = [
            [self.contribution(weights, rank, j, cycle) for j in range(MICROBATCHES)]
            for rank in range(toy.group_size)
        ]
        keys = made[0][0][0]
        scale = 1 / toy.group_size
        total = {}
        for key in keys:
            parts = [[g[key] * scale for g, _ in row] for row in made]
            inner = toy.group_size // outer
            rows = [parts[o * inner : (o + 1) * inner] for o in range(outer)]
            if strategy in ("optim_grads", "optim_grads_params"):
                sums = [
                    added(added(one[j] for one in r) for j in range(MICROBATCHES)) for r in rows
                ]
            else:
                sums = [added(added(one) for one in r) for r in rows]
            total[key] = added(sums)
        return total, [[value for _, value in row] for row in made]


def added(values: Any) -> Tensor:
    return reduce(torch.add, values)


def compare(recipe: str, inner: str, outer: str | None, size: int) -> None:
    """Two steps of two microbatches with one process, to the bit.

    size: ranks of the one axis, or of the outer axis.
    """
    policy = MixedPrecisionPolicy(F32, weight_codec=Float8Reference(recipe))
    arguments: dict[str, Any] = {"mixed_precision_policy": policy, "transport": "point_to_point"}
    for name in NAMES:
        toy: Any
        if outer is None:
            toy = shard(name, inner, size, F32, **arguments)
        else:
            toy = hybrid(inner, outer, size, F32, name, **arguments)
        single = Single(name, recipe)
        single.encoded.append(toy.full_parameters())
        spread(toy.model)
        optimizer = fully_shard_optimizer(torch.optim.SGD(toy.model.parameters(), lr=1e-3))
        rank = torch.distributed.get_rank() % toy.group_size
        for cycle in range(2):
            main = toy.full_parameters()
            for key, value in weights_seen(toy).items():
                if key in main:  # a tied weight goes by its first name
                    earlier = [step[key] for step in single.encoded]
                    same(f"{name} {cycle} {key}", value, quantised(recipe, main[key], F32, earlier))
            losses = []
            for j in range(MICROBATCHES):
                with toy.model.sync() if j == MICROBATCHES - 1 else toy.model.no_sync():
                    value = loss(toy.model(batch(name, rank, j, F32, cycle)))
                    value.backward()
                    losses.append(float(value.detach()))
            expected, all_losses = single.gradients(
                toy, main, cycle, inner, size if outer is not None else 1
            )
            same(f"{name} {cycle} losses", losses, all_losses[rank])
            gradients = toy.full_gradient()
            for key, value in expected.items():
                same(f"{name} {cycle} gradient of {key}", gradients[key], value)
            single.encoded.append(main)
            optimizer.step()
            optimizer.zero_grad()


SAMPLE = [
    ("delayed", "optim_grads_params", None, 2),
    ("mxfp8", "optim_grads_params", "no_shard", 4),
]
EVERY = [
    *((r, s, None, size) for r in RECIPES for s in STRATEGIES for size in (1, 2, 4)),
    *((r, inner, outer, size) for r in RECIPES for inner, outer in PAIRS for size in (2, 4)),
]


@pytest.mark.parametrize(
    ("recipe", "inner", "outer", "size"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.nightly) for case in EVERY],
)
def test_every_recipe_strategy_and_mesh_trains_to_the_bit_like_one_process(
    recipe: str, inner: str, outer: str | None, size: int
) -> None:
    compare(recipe, inner, outer, size)
