"""When weights come and go, and when reductions land."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from mfsdp_core.events import Event
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.on_ranks

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


def test_the_next_gather_begins_before_this_one_is_waited_for() -> None:
    toy = shard(NAME, 3, 2)
    said: list[str] = []
    for unit in toy.model._context.units:
        weights = unit.buckets[0].weights

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
    assert said.index("begin blocks.1") < said.index("wait blocks.0"), said
    assert said.index("begin blocks.2") < said.index("wait blocks.1"), said


def test_prefetching_changes_the_order_only() -> None:
    ahead, plain = events_of_a_step(True), events_of_a_step(False)
    assert not any(kind == "prefetch" for kind, _ in plain)
    assert sorted(e for e in ahead if e[0] != "prefetch") == sorted(plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_modules_show_shards_whenever_no_pass_runs(strategy: str) -> None:
    toy = shard(NAME, strategy, 2)

    def are_shards() -> bool:
        return all(isinstance(p, DTensor) for p in toy.model.parameters())

    assert are_shards()
    value = toy.forward()
    assert are_shards()
    value.backward()
    assert are_shards()


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
