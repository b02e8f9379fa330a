"""When weights come and go: prefetch, release, loading."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from mfsdp_core.events import Event
from oracle.models import batch, build
from oracle.ranks import RankPool
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes

NAME = "aligned_stack"


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_modules_show_shards_whenever_no_pass_runs(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(shapes_outside_a_pass, strategy) == [[True, True, True]] * 4


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


def frozen_outputs_after_loading(strategy: str) -> bool:
    """Whether a frozen weight that was loaded after a forward pass is what the next one uses."""
    toy = shard("frozen", strategy, 4)
    value = batch("frozen", 0, 0, torch.float32)
    with torch.no_grad():
        toy.model(value)
        wanted = build("frozen", seed=8)
        state = {f"module.{name}": value for name, value in wanted.state_dict().items()}
        toy.model.load_state_dict(state)
        return torch.equal(toy.model(value), wanted(value))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loading_reaches_the_compute_copies_of_frozen_weights(
    ranks: RankPool, strategy: str
) -> None:
    assert ranks.run(frozen_outputs_after_loading, strategy) == [True] * 4
