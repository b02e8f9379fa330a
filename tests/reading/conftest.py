"""Results folders for the tests of derived numbers and reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_runs import fill_quickstart

from bench.store import ResultsStore


@pytest.fixture(scope="session")
def quickstart_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A filled results folder shared by tests that only read it."""
    root = tmp_path_factory.mktemp("shared") / "results"
    fill_quickstart(ResultsStore.open(root, create=True))
    return root
