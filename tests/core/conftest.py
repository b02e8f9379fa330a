"""The pool of ranks that all tests of the core share, and a lone rank on a device."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.testing.workers import ForkServer
from oracle.ranks import RankPool

#: Of the pairs of strategy and allocator, those whose code the others run as well.
NIGHTLY_WAYS = {
    ("optim", "storage_resize"),
    ("optim_grads_params", "temporary"),
    ("optim_grads_params", "fixed_pool"),
}


#: Of the others, one of which a test runs daily beside the way that shards everything.
WAYS_IN_TURN = (
    ("no_shard", "storage_resize"),
    ("optim_grads", "storage_resize"),
    ("optim_grads_params", "max_pool"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ways: dict[str, dict[tuple[str, str], pytest.Item]] = {}
    for item in items:
        way = getattr(getattr(item, "callspec", None), "params", {}).get("way")
        if way in NIGHTLY_WAYS:
            item.add_marker(pytest.mark.nightly)
        elif way in WAYS_IN_TURN:
            ways.setdefault(item.nodeid.partition("[")[0], {})[way] = item
    for test, found in ways.items():
        # Which one depends on the name alone, so that all tests together run every way.
        chosen = sorted(found)[zlib.crc32(test.encode()) % len(found)]
        for way in found:
            if way != chosen:
                found[way].add_marker(pytest.mark.nightly)


_POOL: pytest.StashKey[RankPool] = pytest.StashKey()


@pytest.fixture(scope="session")
def ranks(fork_server: ForkServer, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Four gloo ranks, started by the first test that runs something on them."""
    pool = request.session.stash[_POOL] = RankPool(fork_server)
    yield pool
    pool.close()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ranks end before tests of another folder begin: every idle group has a thread that polls."""
    pool = item.session.stash.get(_POOL, None)
    if pool is not None and (nextitem is None or nextitem.path.parent != item.path.parent):
        pool.close()


@pytest.fixture
def fake_group(request: pytest.FixtureRequest) -> Iterator[None]:
    """One rank of torch's fake process group; the file's `FAKE` says which, and of how many."""
    rank, ranks = request.module.FAKE
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    yield
    dist.destroy_process_group()


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """One rank on the first device."""
    device = torch.device("cuda", 0)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()
