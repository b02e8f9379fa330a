"""R20: a deleted model gives its memory back at once, and all of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from bench.testing.workers import ForkServer
from mfsdp_core import MixedPrecisionPolicy, fully_shard_optimizer
from oracle.ranks import RankPool
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes


def live_tensor_bytes() -> int:
    """Bytes of all storages that a Python object of this process can reach, each counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in {torch.Tensor, nn.Parameter}:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def freed_by_deletion(strategy: str) -> tuple[int, int, int, bool]:
    """In a rank: bytes beyond those of the start (at rest, after `del`), ledger, model alive."""
    start = live_tensor_bytes()
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16)
    toy = shard("frozen", strategy, 2, torch.bfloat16, mixed_precision_policy=policy)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(toy.model.parameters()))
    toy.run_cycle(2)
    optimizer.step()
    optimizer.zero_grad()
    model = weakref.ref(toy.model)
    held = sum(toy.model.ledger.bytes_by_category().values())
    at_rest = live_tensor_bytes() - start
    del toy, optimizer
    return at_rest, live_tensor_bytes() - start, held, model() is not None


@pytest.fixture(scope="module")
def fresh_ranks(fork_server: ForkServer) -> Iterator[RankPool]:
    """Ranks in which nothing else has run: what earlier tests left behind would be freed here."""
    pool = RankPool(fork_server)
    yield pool
    pool.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_r20_deleting_the_model_frees_all_that_the_ledger_has_booked(
    fresh_ranks: RankPool, strategy: str
) -> None:
    for at_rest, after, held, alive in fresh_ranks.run(freed_by_deletion, strategy):
        assert at_rest == held
        assert after == 0
        assert not alive
