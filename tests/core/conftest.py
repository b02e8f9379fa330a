"""The pool of ranks that all tests of the core share."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracle.ranks import RankPool

HERE = Path(__file__).parent
_pool = RankPool()


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Four gloo ranks, started by the first test that runs something on them."""
    return _pool


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the ranks with the last test of this folder: other tests count their own processes."""
    if nextitem is None or HERE not in nextitem.path.parents:
        _pool.close()
