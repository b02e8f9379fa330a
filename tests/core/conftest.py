"""The pool of ranks that all tests of the core share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oracle.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four gloo ranks, started by the first test that runs something on them."""
    pool = RankPool()
    yield pool
    pool.close()
