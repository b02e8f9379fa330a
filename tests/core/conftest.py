"""The ranks that all tests of the core share, and a lone rank on a device.

    @pytest.mark.on_ranks

makes a test a function that ranks run, with the arguments that pytest gave it: it fails as the
first rank that raises. Without a number it has the meshes of `oracle.ranks`. With one, as in

    pytestmark = pytest.mark.on_ranks(2)

it runs in a process group of just so many ranks, and what nobody has written is NaN there. Ranks
stay for the next test, and start anew after one that fails.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.testing.workers import ForkServer, Workers
from bench.validate.outcomes import resident
from oracle.ranks import WORLD, RankPool

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

_SECONDS = 200.0


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


#: What ends ranks that may have been started.
_ENDS: pytest.StashKey[list[Callable[[], None]]] = pytest.StashKey()


@pytest.fixture(scope="session")
def ranks(fork_server: ForkServer, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Four gloo ranks, started by the first test that runs something on them."""
    pool = RankPool(fork_server)
    request.session.stash.setdefault(_ENDS, []).append(pool.close)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def worlds(fork_server: ForkServer, request: pytest.FixtureRequest) -> Iterator[Workers]:
    """Up to four ranks for tests that say how many; the first one starts them."""
    with resident(fork_server, WORLD) as made:
        request.session.stash.setdefault(_ENDS, []).append(made.end)
        yield made


@pytest.fixture(autouse=True)
def call_on_ranks(request: pytest.FixtureRequest) -> Callable[..., Any] | None:
    """What calls a function on ranks as the mark says; None without a mark."""
    marker = request.node.get_closest_marker("on_ranks")
    if marker is None:
        return None
    if marker.args:
        world: Workers = request.getfixturevalue("worlds")
        return partial(world.run, ranks=marker.args[0], seconds=_SECONDS)
    pool: RankPool = request.getfixturevalue("ranks")
    return partial(pool.run, **{"seconds": _SECONDS, **marker.kwargs})


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is marked `on_ranks` runs there; any other as usual."""
    call = pyfuncitem.funcargs["call_on_ranks"]
    if call is None:
        return None
    names = inspect.signature(pyfuncitem.function).parameters
    call(pyfuncitem.function, *(pyfuncitem.funcargs[name] for name in names))
    return True


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ranks end before tests of another folder begin: every idle group has a thread that polls."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        for end in item.session.stash.get(_ENDS, []):
            end()


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
