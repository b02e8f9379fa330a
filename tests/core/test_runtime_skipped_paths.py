"""Ranks that take different paths through the model: no hang, the oracle's gradient, no leak."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance.judging import same
from mfsdp_core.events import Event
from oracle.beside_torch import Pair, beside
from oracle.models import Block, loss
from oracle.ranks import mesh
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.on_ranks

#: What a rank does with each of five units: r runs it, s skips it, d runs it and drops the result,
#: p runs it without its branch. By case, one string per rank.
PATHS = {
    "all run": ("rrrrr", "rrrrr"),
    "a branch of the last unit": ("rrrrr", "rrrrp"),
    "a branch of two units": ("rrrrp", "prprr"),
    "one unit": ("rrrrr", "rrsrr"),
    "neighbours": ("rrrrr", "rsssr"),
    "the last units": ("rrrrr", "rrrss"),
    "the first units": ("rrrrr", "ssrrr"),
    "different units": ("srrsr", "rrsrr"),
    "all but one": ("srrrr", "ssssr"),
    "everything": ("rrrrr", "sssss"),
    "the same unit": ("rrsrr", "rrsrr"),
    "a result": ("rrrrr", "rrdrr"),
    "results and units": ("rdrsr", "rrspd"),
}


class Branched(Block):
    """A unit with a branch that may be left out."""

    def __init__(self) -> None:
        super().__init__(width=8, hidden=16)
        self.branch = nn.Linear(8, 8)

    def forward(self, x: Tensor, branched: bool) -> Tensor:
        y = super().forward(x)
        return y + self.branch(x).tanh() if branched else y


class Paths(nn.Module):
    """Five units and a path through them; recompute: how their activations are recomputed."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Branched() for _ in range(5))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor, path: str) -> Tensor:
        x = self.first(x)
        for block, action in zip(self.blocks, path, strict=True):
            if action != "s":
                y = self._run(block, x, action != "p")
                x = x if action == "d" else y
        return self.last(x)

    def _run(self, block: nn.Module, x: Tensor, branched: bool) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return block(x, branched)
        return checkpoint(block, x, branched, use_reentrant=self.recompute == "reentrant")


def inputs(rank: int, cycle: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * cycle + 10 * microbatch + rank)
    return torch.randn(3, 8, dtype=torch.float64, generator=generator)


def sharded(strategy: str, recompute: str, **arguments: Any) -> Pair:
    way = (strategy, "storage_resize")
    more = {"sync_model_each_microbatch": False, **arguments}
    return beside(lambda: Paths(recompute), way, units=[Branched], **more)


def run_case(pair: Pair, case: str, cycle: int) -> None:
    """Two microbatches; the second one swaps the ranks' paths."""
    model, rank = pair.model, mesh(2).get_local_rank("dp")
    for j in range(2):
        x, path = inputs(rank, cycle, j), PATHS[case][(rank + j) % 2]
        loss(pair.plain(x, path)).backward()
        value = model(x, path)
        with torch.no_grad():  # an evaluation that takes another path yet
            model(x, PATHS[case][(rank + j + 1) % 2])
        with model.no_sync() if j == 0 else nullcontext():
            loss(value).backward()
    model.finish_grad_sync()


DAILY = (("optim_grads", "reentrant", True), ("optim_grads_params", "non-reentrant", False))


def combinations() -> list[Any]:
    """Daily two strategies with the two kinds of recomputation."""
    return [
        pytest.param(*way, marks=() if way in DAILY else pytest.mark.nightly)
        for way in itertools.product(
            STRATEGIES, ("none", "reentrant", "non-reentrant"), (True, False)
        )
    ]


@pytest.mark.parametrize(("strategy", "recompute", "prefetch"), combinations())
def test_paths_that_differ_between_ranks_give_the_gradient_of_one_process(
    strategy: str, recompute: str, prefetch: bool
) -> None:
    """Cycle after cycle on one model, which holds no more at rest after any of them."""
    pair = sharded(strategy, recompute, overlap_param_gather=prefetch)
    run_case(pair, "all run", 0)
    pair.zero_grad()
    at_rest = pair.model.ledger.bytes_by_category()
    for cycle, case in enumerate(PATHS, 1):
        if recompute == "reentrant" and any("d" in path for path in PATHS[case]):
            continue  # docs/core-limits.md: the one thing that ranks must not do differently
        run_case(pair, case, cycle)
        pair.compare_gradients()
        pair.zero_grad()
        same(f"bytes at rest after {case}", pair.model.ledger.bytes_by_category(), at_rest)


@pytest.mark.parametrize("case", ["all run", "neighbours", "a branch of two units"])
def test_every_rank_issues_the_same_collectives_and_holds_two_units_at_most(case: str) -> None:
    model = sharded("optim_grads_params", "none").model
    counts: Counter[str] = Counter()
    held: set[str] = set()
    most = 0

    def follow(event: Event) -> None:
        nonlocal most
        if event.kind == "collective":
            counts[event.operation] += 1
        elif event.kind == "materialise":
            held.add(event.bucket)
        elif event.kind == "release":
            held.discard(event.bucket)
        most = max(most, len({bucket.partition("/")[0] for bucket in held}))

    rank = mesh(2).get_local_rank("dp")
    model.events.subscribe(follow)
    loss(model(inputs(rank, 0, 0), PATHS[case][rank])).backward()
    model.finish_grad_sync()
    # Five units of two buckets, gathered forward and backward; the root has four.
    assert counts == {"all_gather": 20, "reduce_scatter": 14}, counts
    assert most == 2, most
