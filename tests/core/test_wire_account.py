"""Every collective of a cycle, with axis, dtype, bytes and bucket: nothing more, nothing less."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy, fully_shard_optimizer
from oracle.facts import facts_of
from oracle.hybrid import PAIRS, hybrid
from oracle.models import TOYS
from oracle.ranks import GROUP_SIZES, WORLD, RankPool
from oracle.sharded import STRATEGIES, Sharded, shard
from oracle.wire import Case, Traffic, expected_traffic

pytestmark = pytest.mark.processes

F32, B16 = torch.float32, torch.bfloat16
#: Padded and split buckets, a frozen one, one tied over the root, recomputed activations.
SAMPLE = ["conv_linear", "frozen", "tied_embedding", "recomputed", "used_twice"]


def gathers_of_unit(name: str, unit: str) -> int:
    """Forward and backward; a unit that runs twice is gathered for each run."""
    return 3 if name == "used_twice" and unit == "blocks.0" else 2


def traffic_of_second_cycle(toy: Sharded, microbatches: int) -> Traffic:
    """In a rank: what the wire log recorded, in the steady state."""
    trainable = [p for p in toy.model.parameters() if p.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.SGD(trainable, lr=0.01))
    for cycle in range(2):
        toy.model.wire_log.clear()
        toy.run_cycle(microbatches, cycle)
        optimizer.step()
        optimizer.zero_grad()
    log = toy.model.wire_log
    assert log.sent_bytes == sum(record.sent_bytes for record in log)
    return Counter((r.operation, r.group, r.dtype, r.payload_bytes, r.bucket) for r in log)


def differences(case: Case, names: list[str]) -> list[str]:
    """In a rank: per toy model, what was sent beyond the account, and what was not sent of it."""
    policy = MixedPrecisionPolicy(F32, F32, case.comm)
    found = []
    for name in names:
        arguments: dict[str, Any] = {"name": name, "mixed_precision_policy": policy}
        if case.outer is None:
            toy = shard(
                strategy=case.inner, group_size=case.inner_size, dtype=case.compute, **arguments
            )
        else:
            toy = hybrid(case.inner, case.outer, case.outer_size, case.compute, **arguments)
        sent = traffic_of_second_cycle(toy, case.microbatches)
        expected = expected_traffic(
            facts_of(name, case.compute), case, partial(gathers_of_unit, name)
        )
        if sent != expected:
            found.append(f"{name} {case}: beyond {sent - expected}, missing {expected - sent}")
    return found


@pytest.mark.sample
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_collective_of_a_cycle_is_accounted_for(
    ranks: RankPool, strategy: str, group_size: int
) -> None:
    case = Case(strategy, None, group_size, 1, 2, B16, B16)
    assert ranks.run(differences, case, SAMPLE) == [[]] * WORLD


@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_every_collective_on_two_axes_is_accounted_for(
    ranks: RankPool, inner: str, outer: str
) -> None:
    case = Case(inner, outer, 2, 2, 2, F32, B16)
    assert ranks.run(differences, case, SAMPLE[:2]) == [[]] * WORLD


@pytest.mark.nightly
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_collective_of_every_model_is_accounted_for(
    ranks: RankPool, strategy: str, group_size: int, microbatches: int
) -> None:
    for compute, comm in ((F32, F32), (B16, F32), (F32, B16)):
        case = Case(strategy, None, group_size, 1, microbatches, compute, comm)
        assert ranks.run(differences, case, list(TOYS), seconds=120.0) == [[]] * WORLD


@pytest.mark.nightly
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("outer_size", [1, 2, 4])
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_every_collective_on_every_mesh_is_accounted_for(
    ranks: RankPool, inner: str, outer: str, outer_size: int, microbatches: int
) -> None:
    case = Case(inner, outer, WORLD // outer_size, outer_size, microbatches, B16, F32)
    assert ranks.run(differences, case, list(TOYS), seconds=120.0) == [[]] * WORLD
