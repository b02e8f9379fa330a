"""The pool of ranks that all tests of the core share, and a lone rank on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from oracle.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four gloo ranks, started by the first test that runs something on them."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """One rank on the first device."""
    device = torch.device("cuda", 0)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()
