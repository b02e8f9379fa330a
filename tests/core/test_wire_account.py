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
from oracle.ranks import GROUP_SIZES, WORLD
from oracle.sharded import STRATEGIES, Sharded, shard
from oracle.wire import Case, Traffic, expected_traffic

pytestmark = pytest.mark.on_ranks

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


def compare(case: Case, names: list[str]) -> None:
    """What toy models send with the account."""
    policy = MixedPrecisionPolicy(F32, F32, case.comm)
    for name in names:
        arguments: dict[str, Any] = {"name": name, "mixed_precision_policy": policy}
        if case.outer is None:
            toy = shard(
                strategy=case.inner, group_size=case.inner_size, dtype=case.compute, **arguments
            )
        else:
            toy = hybrid(case.inner, case.outer, case.outer_size, case.compute, **arguments)
        sent = traffic_of_second_cycle(toy, case.microbatches)
        account = expected_traffic(
            facts_of(name, case.compute), case, partial(gathers_of_unit, name)
        )
        assert sent == account, f"{name}: beyond {sent - account}, missing {account - sent}"


@pytest.mark.sample
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_collective_of_a_cycle_is_accounted_for(strategy: str, group_size: int) -> None:
    compare(Case(strategy, None, group_size, 1, 2, B16, B16), SAMPLE)


@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_every_collective_on_two_axes_is_accounted_for(inner: str, outer: str) -> None:
    compare(Case(inner, outer, 2, 2, 2, F32, B16), SAMPLE[:2])


@pytest.mark.nightly
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_collective_of_every_model_is_accounted_for(
    strategy: str, group_size: int, microbatches: int
) -> None:
    for dtypes in ((F32, F32), (B16, F32), (F32, B16)):
        compare(Case(strategy, None, group_size, 1, microbatches, *dtypes), list(TOYS))


@pytest.mark.nightly
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("outer_size", [1, 2, 4])
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_every_collective_on_every_mesh_is_accounted_for(
    inner: str, outer: str, outer_size: int, microbatches: int
) -> None:
    shape = (WORLD // outer_size, outer_size)
    compare(Case(inner, outer, *shape, microbatches, B16, F32), list(TOYS))
