"""Whole gradients that are scaled on their way into the accumulator, beside some that are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mfsdp_core.events import Event
from oracle.beside_torch import beside
from oracle.ranks import mesh
from oracle.sharded import shard

pytestmark = pytest.mark.on_ranks

WHOLE = ("no_shard", "optim")


class Branches(nn.Module):
    """Two linears, each used when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)

    def forward(self, x: Tensor, uses: str) -> Tensor:
        if "l" in uses:
            x = x + self.left(x)
        if "r" in uses:
            x = x + self.right(x)
        return x.square().sum()


def inputs(rank: int, microbatch: int) -> Tensor:
    seed = torch.Generator().manual_seed(10 * microbatch + rank)
    return torch.randn(3, 6, dtype=torch.float64, generator=seed)


@pytest.mark.sample
@pytest.mark.parametrize("strategy", WHOLE)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("uses", [["lr"], ["l", "lr"], ["l", "r"], ["lr", "l"], ["l", "r", "lr"]])
def test_gradients_of_one_cycle_are_all_scaled_once(
    strategy: str, uses: list[str], fails: bool
) -> None:
    """Over a cycle whose microbatches use the branches in `uses`.

    fails: a backward pass of the last microbatch raises first, and the cycle is begun again.
    """
    pair = beside(
        Branches, (strategy, "storage_resize"), units=[], sync_model_each_microbatch=False
    )
    model = pair.model
    own = mesh(2).get_local_rank("dp")
    if fails:
        broken = inputs(own, 9).requires_grad_()
        with model.sync():
            loss = model(broken, "lr")
            broken.register_hook(lambda _: (_ for _ in ()).throw(ValueError("here")))
            with pytest.raises(ValueError, match="here"):
                loss.backward()
        model.zero_grad_buffer()
    for j, used in enumerate(uses):
        pair.plain(inputs(own, j), used).backward()
        with model.sync() if j == len(uses) - 1 else model.no_sync():
            model(inputs(own, j), used).backward()
    pair.compare_gradients()


@pytest.mark.parametrize("transport", ["native", "point_to_point"])
def test_reductions_in_place_land_at_the_end_and_others_one_unit_later(transport: str) -> None:
    toy = shard("linear_stack", "no_shard", 2, transport=transport)
    toy.run_cycle(1)
    toy.model.zero_grad_buffer()
    seen: list[Event] = []
    toy.model.events.subscribe(seen.append, kinds=("collective", "land"))
    toy.run_cycle(1)
    kinds = [event.kind for event in seen]
    if transport == "native":
        assert kinds == sorted(kinds)
        assert kinds.count("land") > 2, kinds
    else:
        assert "collective" in kinds[kinds.index("land") :], kinds
