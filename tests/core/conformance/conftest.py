"""Conformance tests: functions that every rank of a world of their own runs, on the core as it is.

    pytestmark = pytest.mark.on_ranks(2)

makes each test of a file a function that two ranks call, in a process group of just those two. It
fails as the first rank that raises. What nobody has written is NaN there. Ranks stay for the next
test, and start anew after one that fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.testing.workers import ForkServer, Workers
from bench.validate.rank import prepare

_MOST_RANKS = 4
_SECONDS = 120.0


@pytest.fixture(scope="package", autouse=True)
def worlds(fork_server: ForkServer) -> Iterator[Workers]:
    """Up to four ranks; the first test that needs them starts them."""
    with fork_server.workers(_MOST_RANKS, None, prepare) as made:
        yield made


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is marked `on_ranks` runs there; any other as usual."""
    marker = pyfuncitem.get_closest_marker("on_ranks")
    if marker is None:
        return None
    worlds: Workers = pyfuncitem.funcargs["worlds"]
    worlds.run(pyfuncitem.function, ranks=marker.args[0], seconds=_SECONDS)
    return True
