"""When weights come and go: prefetch, release, recomputation, root parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model
from mfsdp_core.events import Event
from oracle.models import Block, batch, build, loss
from oracle.ranks import RankPool, mesh
from oracle.reference import expected_gradient, relative_difference
from oracle.sharded import STRATEGIES, Sharded, shard

pytestmark = pytest.mark.processes

NAME = "aligned_stack"


class Recomputing(nn.Module):
    """The toy model, every unit under activation checkpointing."""

    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.last = inner.blocks, inner.last
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (1, 1)).requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def events_of_a_step(prefetch: bool) -> list[tuple[str, str]]:
    toy = shard(NAME, 3, 2, overlap_param_gather=prefetch)
    seen: list[Event] = []
    toy.model.events.subscribe(seen.append)
    toy.run_cycle(1)
    kinds = ("prefetch", "release", "collective")
    return [
        (event.operation or event.kind, event.bucket)
        if event.kind != "prefetch"
        else ("prefetch", event.bucket)
        for event in seen
        if event.kind in kinds
    ]


def recomputed(strategy: str, reentrant: bool) -> tuple[float, dict[str, int]]:
    """Gradient error against the reference, and what the core holds in compute weights after."""
    model = fully_shard_model(
        Recomputing(build(NAME, torch.float64), reentrant=reentrant),
        device_mesh=mesh(2)["dp"],
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        sync_model_each_microbatch=False,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )
    toy = Sharded(NAME, 2, torch.float64, model)
    at_rest = model.ledger.bytes_by_category()
    toy.run_cycle(2)
    after = model.ledger.bytes_by_category()
    grown = {name: after[name] - at_rest[name] for name in after}
    expected = expected_gradient(NAME, 2, 2, torch.float64, 0)
    return relative_difference(toy.full_gradient(), expected), grown


def shapes_outside_a_pass(strategy: str) -> list[bool]:
    """Whether modules show shards: before, after a forward, after a backward pass."""
    toy = shard(NAME, strategy, 2)

    def shards() -> bool:
        return all(isinstance(p, DTensor) for p in toy.model.parameters())

    seen = [shards()]
    value = toy.forward()
    seen.append(shards())
    value.backward()
    return [*seen, shards()]


class Crossed(nn.Module):
    """Two units that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width=8, hidden=16) for _ in range(2))
        self.blocks[1].up.weight = self.blocks[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tie_across_units(strategy: str) -> tuple[float, int]:
    """Largest gradient error against one process, and how many parameters the optimizer sees."""
    torch.manual_seed(3)
    reference = Crossed().double()
    torch.manual_seed(3)
    model: Any = fully_shard_model(
        Crossed().double(),
        device_mesh=mesh(2)["dp"],
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )
    group = mesh(2)["dp"]
    inputs = [torch.randn(3, 8, dtype=torch.float64, generator=_seeded(r)) for r in range(2)]
    for value in inputs:
        (loss(reference(value)) / 2).backward()
    loss(model(inputs[group.get_local_rank()])).backward()
    found = Sharded(NAME, 2, torch.float64, model).full_gradient()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    return relative_difference(found, expected), len(list(model.parameters()))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def output_of_fixed_batch(strategy: str) -> bool:
    """Whether inference between steps uses current weights, as a reference module does."""
    toy = shard(NAME, strategy, 2, torch.float64)
    module = build(NAME, torch.float64)
    value = batch(NAME, 0, 0, torch.float64)
    with torch.no_grad():
        return torch.equal(toy.model(value), module(value))


def test_the_next_unit_is_gathered_while_one_computes(ranks: RankPool) -> None:
    for events in ranks.run(events_of_a_step, True):
        prefetched = [bucket for kind, bucket in events if kind == "prefetch"]
        first, last = "blocks.0/0", "blocks.2/0"
        assert prefetched == [first, "blocks.1/0", last, last, "blocks.1/0", first]
        # Unit 1's gather is on the wire before unit 0 has been released.
        gathers = [i for i, e in enumerate(events) if e == ("all_gather", "blocks.1/0")]
        assert gathers[0] < events.index(("release", first))


def waits_of_a_forward_pass() -> list[str]:
    """Gathers of units as they begin, and as somebody waits for them."""
    toy = shard(NAME, 3, 2)
    said: list[str] = []
    for unit in toy.model._context.units:
        weights = unit.groups[0].weights

        def issue(*arguments: Any, begin: Any = weights.issue, name: str = unit.name) -> bool:
            started: bool = begin(*arguments)
            said.extend([f"begin {name}"] if started else [])
            return started

        def complete(wait: Any = weights.complete, name: str = unit.name) -> None:
            said.append(f"wait {name}")
            wait()

        weights.issue, weights.complete = issue, complete
    with torch.no_grad():
        toy.forward()
    return list(dict.fromkeys(said))


def test_the_next_gather_begins_before_this_one_is_waited_for(ranks: RankPool) -> None:
    for said in ranks.run(waits_of_a_forward_pass):
        assert said.index("begin blocks.1") < said.index("wait blocks.0")
        assert said.index("begin blocks.2") < said.index("wait blocks.1")


def test_prefetching_changes_the_order_only(ranks: RankPool) -> None:
    with_it = ranks.run(events_of_a_step, True)
    without = ranks.run(events_of_a_step, False)
    for ahead, plain in zip(with_it, without, strict=True):
        assert not any(kind == "prefetch" for kind, _ in plain)
        assert sorted(e for e in ahead if e[0] != "prefetch") == sorted(plain)


@pytest.mark.sample
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recomputed_activations_change_no_gradient_and_leave_no_weight_behind(
    ranks: RankPool, strategy: str, reentrant: bool
) -> None:
    for error, grown in ranks.run(recomputed, strategy, reentrant):
        assert error < 1e-12
        assert set(grown.values()) == {0}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_modules_show_shards_whenever_no_pass_runs(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(shapes_outside_a_pass, strategy) == [[True, True, True]] * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_weight_tied_across_units_has_one_shard_and_one_gradient(
    ranks: RankPool, strategy: str
) -> None:
    for error, parameters in ranks.run(tie_across_units, strategy):
        assert error < 1e-12
        assert parameters == 9


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inference_computes_what_the_bare_module_computes(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(output_of_fixed_batch, strategy) == [True] * 4


def most_units_at_once() -> int:
    """Units whose compute weights exist at the same time, at most, over a training step."""
    toy = shard(NAME, 3, 2)
    held: set[str] = set()
    most = 0

    def follow(event: Event) -> None:
        nonlocal most
        if event.kind == "materialise":
            held.add(event.bucket)
        elif event.kind == "release":
            held.discard(event.bucket)
        most = max(most, len(held))

    toy.model.events.subscribe(follow)
    toy.run_cycle(2)
    return most


def test_two_units_at_most_are_materialised_at_once(ranks: RankPool) -> None:
    assert ranks.run(most_units_at_once) == [2] * 4
